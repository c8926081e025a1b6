"""Parts of groups: a part is at most `trainer.micro_batch_size` images of one group, with all their trained steps.

A part is the unit of work that is given to one rank. How groups are cut does not depend on the number of ranks, and the
sum of the parts' gradients is exact (see `exact.py`), so results do not depend on which rank computes which part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from async_flowrl.training.messages import GroupMeta, Manifest


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank among the trainer ranks."""

    rank: int = 0
    """Number of the rank, from 0."""
    size: int = 1
    """Number of all ranks."""
    per_replica: int = 1
    """Number of ranks that share one copy (replica) of the base weights; they run all collectives together."""
    by_group: bool = False
    """True: the ranks of a replica add up their gradients part by part (tune=full with shard=full), so which parts are
    computed side by side must be a function of the group alone. False: each rank has a sum of its own."""

    @property
    def replica(self) -> range:
        """The numbers of the ranks in this rank's replica."""
        start = self.rank - self.rank % self.per_replica
        return range(start, start + self.per_replica)


@dataclass(frozen=True)
class Part:
    """A part that a rank computes."""

    group: int
    """Position of its group in the call."""
    part: int
    """Number of the part in its group, from 0."""
    counts: bool = True
    """False: it is computed only because other ranks of the replica wait in collectives, and its gradient is unused."""


def cut(selected: Sequence[int], samples: int) -> list[Sequence[int]]:
    """Returns the parts of a group: the selected images, `samples` at a time; the last part may have fewer."""
    return [selected[start : start + samples] for start in range(0, len(selected), samples)]


def parts_of(metas: Sequence[GroupMeta], own: RankPosition, samples: int) -> list[Part]:
    """Returns the parts that this rank computes of the groups of one call, in order; `samples` images per part.

    All ranks of a replica must compute the same number of parts, because they gather the sharded base together. A rank
    with fewer repeats its last part, and a rank without parts computes those of another; such parts do not count.
    With `own.by_group` that holds for each group of the call, so no part is computed beside one of another group.
    Raises ValueError if a group's owners do not fit the number of its parts or the ranks.
    """
    positions = [[position] for position in range(len(metas))] if own.by_group else [list(range(len(metas)))]
    return [part for together in positions for part in _side_by_side(metas, together, own, samples)]


def _side_by_side(metas: Sequence[GroupMeta], positions: Sequence[int], own: RankPosition, samples: int) -> list[Part]:
    """Returns this rank's parts of the groups at these positions of a call, as many as every rank of its replica."""
    by_rank: dict[int, list[Part]] = {rank: [] for rank in own.replica}
    for position in positions:
        for part, owner in enumerate(_owners(metas[position], own, samples)):
            if owner in by_rank:
                by_rank[owner].append(Part(position, part))
    longest, mine = max(by_rank.values(), key=len), by_rank[own.rank]
    fill = mine[-1:] * (len(longest) - len(mine)) if mine else longest
    return mine + [Part(part.group, part.part, counts=False) for part in fill]


def tickets_of(meta: GroupMeta, parts: Iterable[int], samples: int) -> tuple[int, ...]:
    """Returns the positions, in the group, of the tickets that have the images of these parts."""
    images, chosen = len(meta.advantages) // meta.tickets, cut(meta.selected, samples)
    return tuple(sorted({image // images for part in parts for image in chosen[part]}))


def tickets_for(metas: Sequence[GroupMeta], own: RankPosition, samples: int) -> tuple[tuple[int, ...], ...]:
    """Returns for each group of a call the positions of the tickets whose trajectories this rank needs."""
    parts = parts_of(metas, own, samples)
    return tuple(
        tickets_of(meta, (part.part for part in parts if part.group == position), samples)
        for position, meta in enumerate(metas)
    )


def _owners(meta: GroupMeta, own: RankPosition, samples: int) -> Sequence[int]:
    count = len(cut(meta.selected, samples))
    if not meta.owners:
        return [own.rank] * count
    if len(meta.owners) != count or not all(0 <= owner < own.size for owner in meta.owners):
        raise ValueError(
            f"group {meta.group} has {count} parts of {samples} samples for {own.size} ranks, its owners are "
            f"{list(meta.owners)}"
        )
    return meta.owners


Parts = Mapping[int, int]
"""Number of a group → number of its parts."""


class NotThePlan(RuntimeError):
    """Raised if the ranks' sums are not exactly the planned optimizer step; nothing was added up yet."""


def missing(planned: Parts, manifests: Iterable[Manifest]) -> dict[int, set[int]]:
    """Returns the planned parts that are in no sum: number of the group → numbers of the parts."""
    there = {part for manifest in manifests for part in manifest.parts}
    lacking = {group: {p for p in range(count) if (group, p) not in there} for group, count in planned.items()}
    return {group: parts for group, parts in lacking.items() if parts}


def check_plan(step: int, update: int, attempt: int, planned: Parts, manifests: Mapping[str, Manifest]) -> None:
    """Raises NotThePlan unless each planned part is in exactly one sum, and all sums are of this step and attempt.

    `manifests` maps the name of a rank to the contents of its sum; a rank with an empty sum may be missing.
    """
    where = f"step {step}, optimizer step {update}"
    owners: dict[tuple[int, int], str] = {}
    for name, manifest in manifests.items():
        if (manifest.step, manifest.update, manifest.attempt) != (step, update, attempt):
            raise NotThePlan(
                f"{where}, attempt {attempt}: {name} has a sum of step {manifest.step}, optimizer step "
                f"{manifest.update}, attempt {manifest.attempt}"
            )
        for group, part in manifest.parts:
            if (other := owners.get((group, part))) is not None:
                raise NotThePlan(f"{where}: part {part} of group {group} is in the sums of {other} and of {name}")
            if part >= planned.get(group, 0):
                raise NotThePlan(f"{where}: {name} has added part {part} of group {group}, which was not planned")
            owners[group, part] = name
    if lacking := missing(planned, manifests.values()):
        group, parts = next(iter(lacking.items()))
        raise NotThePlan(f"{where}: part {min(parts)} of group {group} is in no rank's sum")
