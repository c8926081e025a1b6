"""The parts of the groups that a rank trains: micro-batches of a group's samples with all their trained steps.

Parts are cut by configuration alone and never by the number of ranks: a part's gradient is a function of the weights
and of its rows, whichever rank computes it, and their sum is exact (see `exact.py`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_flowrl.training.messages import GroupMeta

NOBODY = -1
"""The owner of a part that is not to be computed: it is in some rank's sum already."""


@dataclass(frozen=True)
class Place:
    """A rank among the trainer ranks."""

    rank: int = 0
    size: int = 1
    per_replica: int = 1
    """Ranks that hold one copy of the base between them; they gather its blocks together."""

    @property
    def replica(self) -> range:
        """The ranks of this rank's replica."""
        start = self.rank - self.rank % self.per_replica
        return range(start, start + self.per_replica)


@dataclass(frozen=True)
class Part:
    """A part to compute: of the group at this position of the call."""

    group: int
    part: int
    counts: bool = True
    """False: computed only because the other ranks of the replica wait for its collectives; it contributes nothing."""


def cut(selected: Sequence[int], samples: int) -> list[Sequence[int]]:
    """The selected images, `samples` at a time; the last part may have fewer."""
    return [selected[start : start + samples] for start in range(0, len(selected), samples)]


def parts_of(metas: Sequence[GroupMeta], place: Place, samples: int) -> list[Part]:
    """What this rank computes of the groups of one call, in order.

    The ranks of a replica that shards the base gather its blocks together, so each of them computes as many parts as
    the one that has most: a rank that has fewer computes its own last one again, one that has none those of another.
    Raises ValueError where a group's owners do not fit its parts or the ranks.
    """
    by_rank: dict[int, list[Part]] = {rank: [] for rank in place.replica}
    for position, meta in enumerate(metas):
        for part, owner in enumerate(_owners(meta, place, samples)):
            if owner in by_rank:
                by_rank[owner].append(Part(position, part))
    longest, mine = max(by_rank.values(), key=len), by_rank[place.rank]
    fill = mine[-1:] * (len(longest) - len(mine)) if mine else longest
    return mine + [Part(part.group, part.part, counts=False) for part in fill]


def tickets_of(meta: GroupMeta, parts: Iterable[int], samples: int) -> tuple[int, ...]:
    """The group's tickets, by their place in it, that hold the images of these parts."""
    images, chosen = len(meta.advantages) // meta.tickets, cut(meta.selected, samples)
    return tuple(sorted({image // images for part in parts for image in chosen[part]}))


def tickets_for(metas: Sequence[GroupMeta], place: Place, samples: int) -> tuple[tuple[int, ...], ...]:
    """Of each group of a call, the tickets whose trajectories this rank needs: those of the parts it computes."""
    parts = parts_of(metas, place, samples)
    return tuple(
        tickets_of(meta, (part.part for part in parts if part.group == position), samples)
        for position, meta in enumerate(metas)
    )


def _owners(meta: GroupMeta, place: Place, samples: int) -> Sequence[int]:
    count = len(cut(meta.selected, samples))
    if not meta.owners:
        return [place.rank] * count
    if len(meta.owners) != count or not all(NOBODY <= owner < place.size for owner in meta.owners):
        raise ValueError(
            f"group {meta.group} has {count} parts of {samples} samples for {place.size} ranks, its owners are "
            f"{list(meta.owners)}"
        )
    return meta.owners
