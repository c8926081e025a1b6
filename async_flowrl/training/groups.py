"""The groups of one call to a trainer rank, each with the trajectories that came along and the parts to compute."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import torch

from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.micro_batches import Group
from async_flowrl.training.parts import Part, RankPosition, parts_of
from async_flowrl.types import Trajectory


def groups_of(
    metas: Sequence[GroupMeta],
    trajectories: Sequence[Trajectory],
    tickets: Sequence[Sequence[int]],
    own: RankPosition,
    samples: int,
    device: torch.device,
) -> Iterator[tuple[Group, list[Part]]]:
    """Yields the groups of a call of which this rank computes parts, with these parts of `samples` images at most.

    `tickets`: which of each group's tickets stand in `trajectories`, group after group; empty: all. Raises ValueError
    if their numbers differ.
    """
    held = tickets or [range(meta.tickets) for meta in metas]
    if sum(map(len, held)) != len(trajectories):
        raise ValueError(
            f"{len(metas)} groups have {sum(map(len, held))} tickets, got {len(trajectories)} trajectories"
        )
    starts = list(accumulate(map(len, held), initial=0))
    for position, of_group in groupby(parts_of(metas, own, samples), key=lambda part: part.group):
        given = trajectories[starts[position] : starts[position + 1]]
        yield Group(metas[position], given, device=device, held=held[position]), list(of_group)
