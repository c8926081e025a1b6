"""Cuts the trajectories of a group into micro-batches for the network; each has rows of one group, hence one prompt."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.seeds import derive
from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.parts import Part, RankPosition, cut, parts_of
from async_flowrl.transfers import upload
from async_flowrl.types import Trajectory


class Group:
    """One group on a trainer rank: makes micro-batches of its selected images, on `device`.

    Copies to the device are only queued; the host does not wait for them.
    """

    def __init__(
        self, meta: GroupMeta, tickets: Sequence[Trajectory], *, device: torch.device, held: Sequence[int] | None = None
    ) -> None:
        """`tickets` are the trajectories at the positions `held` in the group; None means all tickets of the group.

        Raises ValueError if their number or sizes do not fit, or if they differ in schedule, window or prompt.
        """
        wanted = range(meta.tickets) if held is None else held
        if len(tickets) != len(wanted) or not tickets:
            raise ValueError(f"group {meta.group} has {len(wanted)} tickets, got {len(tickets)} trajectories")
        first = tickets[0]
        for other in tickets[1:]:
            if not _agree(first, other):
                raise ValueError(f"the tickets of group {meta.group} differ in schedule, window or conditioning")
        images = sum(len(t.latents) for t in tickets)
        if not images * meta.tickets == len(meta.advantages) * len(wanted) == len(meta.seeds) * len(wanted):
            raise ValueError(
                f"group {meta.group} has {images} images in {len(wanted)} of {meta.tickets} tickets, "
                f"{len(meta.advantages)} advantages and {len(meta.seeds)} seeds"
            )
        self.meta, self._device = meta, device
        self._per_ticket = len(meta.advantages) // meta.tickets
        self._tickets = dict(zip(wanted, tickets, strict=True))
        self.train_steps = first.train_steps
        self.conditioning = to_device(first.conditioning, device)
        self._levels = torch.tensor(first.sigmas, dtype=torch.float32)
        self._sigmas = upload(self._levels, device)
        self._points = {point: position for position, point in enumerate(first.points)}

    def micro_batches(self, records: str, part: int, *, samples: int, steps: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of part number `part` (see parts.py), which has at most `samples` images.

        Each has all images of the part at `steps` denoising steps; the rows of a step are adjacent. `records` is that
        of the algorithm. Raises ValueError if `steps` does not divide the number of trained steps.
        """
        if len(self.train_steps) % steps:
            raise ValueError(
                f"group {self.meta.group} trains {len(self.train_steps)} steps, which micro-batches of {steps} do not "
                "divide"
            )
        chosen = cut(self.meta.selected, samples)[part]
        latents, log_probs = self._rows(chosen)
        for first in range(0, len(self.train_steps), steps):
            columns = range(first, first + steps)
            yield self._micro_batch(records, chosen, columns, latents=latents, log_probs=log_probs)

    def _rows(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Returns latents [m, P, ...] and log-probs [m, W] of the chosen images, on the device."""
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
        )

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
        and one.conditioning.keys() == other.conditioning.keys()
        and all(np.array_equal(value, other.conditioning[name]) for name, value in one.conditioning.items())
    )


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
