"""The parts of the groups that a rank trains: micro-batches of a group's samples with all their trained steps.

Parts are cut by configuration alone and never by the number of ranks: a part's gradient is a function of the weights
and of its rows, whichever rank computes it, and their sum is exact (see `exact.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_flowrl.training.messages import GroupMeta

if TYPE_CHECKING:  # the controller cuts parts, too, and has no use for FSDP
    from async_flowrl.training.fsdp import World


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


def parts_of(metas: Sequence[GroupMeta], world: "World", samples: int) -> list[Part]:
    """What this rank computes of the groups of one call, in order.

    The ranks of a replica that shards the base gather its blocks together, so each of them computes as many parts as
    the one that has most. Raises ValueError where a group's owners do not fit its parts or the ranks.
    """
    by_rank: dict[int, list[Part]] = {rank: [] for rank in world.replica}
    for place, meta in enumerate(metas):
        for part, owner in enumerate(_owners(meta, world, samples)):
            if owner in by_rank:
                by_rank[owner].append(Part(place, part))
    longest = max(by_rank.values(), key=len)
    mine = by_rank[world.rank]
    return mine + [Part(part.group, part.part, counts=False) for part in longest[len(mine) :]]


def _owners(meta: GroupMeta, world: "World", samples: int) -> Sequence[int]:
    count = len(cut(meta.selected, samples))
    if not meta.owners:
        return [world.rank] * count
    if len(meta.owners) != count or not all(0 <= owner < world.size for owner in meta.owners):
        raise ValueError(
            f"group {meta.group} has {count} parts of {samples} samples for {world.size} ranks, its owners are "
            f"{list(meta.owners)}"
        )
    return meta.owners
