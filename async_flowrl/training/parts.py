"""Parts of groups: a part is at most `trainer.micro_batch_size` images of one group, with all their trained steps.

A part is given to one rank. The cut does not depend on the number of ranks and the sum of gradients is exact
(exact.py), so results do not depend on which rank computes which part.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.seeds import derive
from async_flowrl.training.messages import GroupMeta, Manifest
from async_flowrl.transfers import upload
from async_flowrl.types import Conditioning, Trajectory


@dataclass(frozen=True)
class World:
    """A rank's position among the trainer ranks, with their collectives."""

    rank: int = 0  # Number of the rank, from 0.
    size: int = 1  # Number of all ranks.
    # Number of ranks that share one copy (replica) of the base weights; they run all collectives together.
    per_replica: int = 1
    # True: the ranks of a replica add up their gradients part by part (tune=full with shard=full), so which parts are
    # computed side by side must be a function of the group alone. False: each rank has a sum of its own.
    by_group: bool = False
    joined: bool = False  # True if this process has joined a process group; otherwise it trains alone.

    @classmethod
    def current(cls) -> "World":
        """Returns the position in torch.distributed's default process group, or that of a lone rank without one."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), joined=True)

    def sum(self, values: Tensor) -> None:
        """Sums `values` over all ranks, in place and with the same bits; without a process group it does nothing."""
        if self.size > 1 and dist.is_initialized():
            dist.all_reduce(values)

    def gather(self, values: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [values]
        by_rank = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(by_rank, values)
        return by_rank

    @property
    def replica(self) -> range:
        start = self.rank - self.rank % self.per_replica
        return range(start, start + self.per_replica)


@dataclass(frozen=True)
class Part:
    group: int  # Position of its group in the call.
    part: int  # Number of the part in its group, from 0.
    # False: it is computed only because other ranks of the replica wait in collectives, and its gradient is unused.
    counts: bool = True


def cut(selected: Sequence[int], samples: int) -> tuple[tuple[int, ...], ...]:
    """Returns the parts of a group: the selected images, `samples` at a time; the last part may have fewer."""
    return tuple(tuple(selected[start : start + samples]) for start in range(0, len(selected), samples))


def parts_of(metas: Sequence[GroupMeta], place: World) -> list[Part]:
    """Returns the parts that this rank computes of the groups of one call, in order.

    The ranks of a replica gather the base together, so they need equal numbers of parts (with `place.by_group` in each
    group): a rank with fewer repeats its last part or computes another's, which does not count. Raises ValueError for
    bad owners.
    """
    positions = [[position] for position in range(len(metas))] if place.by_group else [list(range(len(metas)))]
    return [part for together in positions for part in _side_by_side(metas, together, place)]


def _side_by_side(metas: Sequence[GroupMeta], positions: Sequence[int], place: World) -> list[Part]:
    by_rank: dict[int, list[Part]] = {rank: [] for rank in place.replica}
    for position in positions:
        for part, owner in enumerate(_owners(metas[position], place)):
            if owner in by_rank:
                by_rank[owner].append(Part(position, part))
    longest, mine = max(by_rank.values(), key=len), by_rank[place.rank]
    fill = mine[-1:] * (len(longest) - len(mine)) if mine else longest
    return mine + [Part(part.group, part.part, counts=False) for part in fill]


def tickets_of(meta: GroupMeta, parts: Iterable[int]) -> tuple[int, ...]:
    """Returns the positions, in the group, of the tickets that have the images of these parts."""
    images = len(meta.advantages) // meta.tickets
    return tuple(sorted({image // images for part in parts for image in meta.parts[part]}))


def tickets_for(metas: Sequence[GroupMeta], place: World) -> tuple[tuple[int, ...], ...]:
    """Returns for each group of a call the positions of the tickets whose trajectories this rank needs."""
    parts = parts_of(metas, place)
    return tuple(
        tickets_of(meta, (part.part for part in parts if part.group == position)) for position, meta in enumerate(metas)
    )


def _owners(meta: GroupMeta, place: World) -> Sequence[int]:
    count = len(meta.parts)
    if not meta.owners:
        return [place.rank] * count
    if len(meta.owners) != count or not all(0 <= owner < place.size for owner in meta.owners):
        raise ValueError(
            f"group {meta.group} has {count} parts for {place.size} ranks, its owners are {list(meta.owners)}"
        )
    return meta.owners


Parts = Mapping[int, int]  # Number of a group → number of its parts.


class NotThePlan(RuntimeError):
    """Raised if the ranks' sums are not exactly the planned optimizer step; nothing was added up yet."""


def check_plan(step: int, update: int, attempt: int, planned: Parts, manifests: Mapping[str, Manifest]) -> None:
    """Raises NotThePlan unless each planned part is in exactly one of the `manifests`, of this step and attempt."""
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
    for group, count in planned.items():
        if absent := [part for part in range(count) if (group, part) not in owners]:
            raise NotThePlan(f"{where}: part {absent[0]} of group {group} is in no rank's sum")


class Group:
    """One group on a trainer rank: makes micro-batches of its selected images, without waiting for copies."""

    def __init__(
        self, meta: GroupMeta, tickets: Sequence[Trajectory], *, device: torch.device, held: Sequence[int] | None = None
    ) -> None:
        """`tickets` are the trajectories at the positions `held` (None: all). Raises ValueError if they don't fit."""
        positions = range(meta.tickets) if held is None else held
        if len(tickets) != len(positions) or not tickets:
            raise ValueError(f"group {meta.group} has {len(positions)} tickets, got {len(tickets)} trajectories")
        first = tickets[0]
        for other in tickets[1:]:
            if not _agree(first, other):
                raise ValueError(f"the tickets of group {meta.group} differ in schedule, window or conditioning")
        images = sum(len(t.latents) for t in tickets)
        if not images * meta.tickets == len(meta.advantages) * len(positions) == len(meta.seeds) * len(positions):
            raise ValueError(
                f"group {meta.group} has {images} images in {len(positions)} of {meta.tickets} tickets, "
                f"{len(meta.advantages)} advantages and {len(meta.seeds)} seeds"
            )
        self.meta, self._device = meta, device
        self._per_ticket = len(meta.advantages) // meta.tickets
        self._tickets = dict(zip(positions, tickets, strict=True))
        self.train_steps = first.train_steps
        self.conditioning = to_device(first.conditioning, device)
        self.negative = None if first.negative is None else to_device(first.negative, device)
        self._levels = torch.tensor(first.sigmas, dtype=torch.float32)
        self._sigmas = upload(self._levels, device)
        self._points = {point: position for position, point in enumerate(first.points)}

    def micro_batches(self, records: str, part: int, *, steps: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a part: all its images at `steps` denoising steps, a step's rows adjacent."""
        if len(self.train_steps) % steps:
            raise ValueError(
                f"group {self.meta.group} trains {len(self.train_steps)} steps, which micro-batches of {steps} do not "
                "divide"
            )
        chosen = self.meta.parts[part]
        latents, log_probs = self._rows(chosen)
        for first in range(0, len(self.train_steps), steps):
            columns = range(first, first + steps)
            yield self._micro_batch(records, chosen, columns, latents=latents, log_probs=log_probs)

    def _rows(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        latents = np.stack([ticket.latents[i] for ticket, i in self._locate(chosen)])
        log_probs = np.stack([ticket.log_probs[i] for ticket, i in self._locate(chosen)])
        return self._upload(torch.from_numpy(latents)), self._upload(torch.from_numpy(log_probs))

    def _upload(self, values: Tensor) -> Tensor:
        return upload(values.to(torch.float32), self._device)

    def _locate(self, chosen: Sequence[int]) -> Iterator[tuple[Trajectory, int]]:
        for image in chosen:
            ticket, row = divmod(image, self._per_ticket)
            if ticket not in self._tickets or row >= len(self._tickets[ticket].latents):
                raise ValueError(f"group {self.meta.group} has no image {image} among its tickets {[*self._tickets]}")
            yield self._tickets[ticket], row

    def _micro_batch(
        self, records: str, chosen: Sequence[int], columns: range, *, latents: Tensor, log_probs: Tensor
    ) -> MicroBatch:
        indices = [self.train_steps[c] for c in columns]
        steps = torch.tensor(indices).repeat_interleave(len(chosen))
        final = records == "final"
        last = len(self._levels) - 1
        before = [self._point(last if final else i) for i in indices]
        after = [self._point(last if final else i + 1) for i in indices]
        advantages = torch.tensor([self.meta.advantages[i] for i in chosen], dtype=torch.float32).repeat(len(indices))
        recorded = log_probs.new_zeros(len(chosen), len(self.train_steps)) if final else log_probs
        return MicroBatch(
            latents=torch.cat([latents[:, p] for p in before]),
            next_latents=torch.cat([latents[:, p] for p in after]),
            sigma=self._upload(self._levels[steps]),
            sigma_next=self._upload(self._levels[steps + 1]),
            steps=steps,
            sigmas=self._sigmas,
            advantages=self._upload(advantages),
            positive=tuple((advantages > 0).tolist()),
            rollout_log_prob=torch.cat([recorded[:, c] for c in columns]),
            seeds=tuple(derive(self.meta.seeds[i], "row", index) for index in indices for i in chosen),
            age=self.meta.age,
            group_seeds=tuple(derive(self.meta.seeds[0], "row", index) for index in indices for _ in chosen),
            group_means=self._means(columns, len(chosen)),
        )

    def _means(self, columns: range, images: int) -> Tensor | None:
        if not self.meta.means:
            return None
        by_level = torch.tensor([self.meta.means[c] for c in columns], dtype=torch.float64)
        return upload(by_level.repeat_interleave(images, dim=0), self._device)

    def _point(self, index: int) -> int:
        if index not in self._points:
            raise ValueError(f"group {self.meta.group} lacks the latents at schedule position {index}")
        return self._points[index]


def to_device(conditioning: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Returns the conditioning as tensors on `device`; they are copies, as arrays of the object store are read-only."""
    return {name: upload(torch.tensor(value), device) for name, value in conditioning.items()}


def _agree(one: Trajectory, other: Trajectory) -> bool:
    return (
        one.points == other.points
        and one.train_steps == other.train_steps
        and np.array_equal(one.sigmas, other.sigmas)
        and _equal(one.conditioning, other.conditioning)
        and _equal(one.negative or {}, other.negative or {})
    )


def _equal(one: Conditioning, other: Conditioning) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(value, other[name]) for name, value in one.items())


def groups_of(
    metas: Sequence[GroupMeta],
    trajectories: Sequence[Trajectory],
    tickets: Sequence[Sequence[int]],
    place: World,
    device: torch.device,
) -> Iterator[tuple[Group, list[Part]]]:
    """Yields the groups of a call of which this rank computes parts, with these parts.

    `tickets`: which of each group's tickets stand in `trajectories`, group after group; empty: all.
    """
    held = tickets or [range(meta.tickets) for meta in metas]
    if sum(map(len, held)) != len(trajectories):
        raise ValueError(
            f"{len(metas)} groups have {sum(map(len, held))} tickets, got {len(trajectories)} trajectories"
        )
    starts = list(accumulate(map(len, held), initial=0))
    for position, of_group in groupby(parts_of(metas, place), key=lambda part: part.group):
        given = trajectories[starts[position] : starts[position + 1]]
        yield Group(metas[position], given, device=device, held=held[position]), list(of_group)
