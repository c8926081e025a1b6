"""Messages between the controller and a trainer rank: frozen, picklable and small; trajectories travel separately.

A rank answers a TrainRequest with a Manifest, and at the end of an optimizer step with UpdateStats. A part is a
micro-batch of a group's images (see parts.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from async_flowrl.types import EncoderInput, Prompt, Sampling, Span

# Metric of the probed part only: the difference of log-probs between rollout engine and trainer for equal weights.
GAP = "behaviour_gap"


# Training steps from one measurement of `behaviour_gap` to the next, after as many steps that are all measured.
REPLAYED_EVERY_STEPS = 10


def is_replayed(step: int) -> bool:
    """Returns True if this step measures `behaviour_gap` even if that costs a forward pass."""
    return step < REPLAYED_EVERY_STEPS or step % REPLAYED_EVERY_STEPS == 0


@dataclass(frozen=True)
class StepPlan:
    # Number of rows (image × denoising step) of the step over all ranks; the sum of losses is divided by it. Groups
    # that are skipped count, so they weigh as much as groups with gradient zero. See `TrainRequest.rows`.
    rows: int
    # Number of the optimizer step in its batch, from 0; from 1 on, every group needs proximal predictions.
    update: int = 0
    # Number that rises whenever an optimizer step begins, also again; sums of other attempts are not used.
    attempt: int = 0
    replay: bool = True  # True: measure `behaviour_gap` also if it needs a forward pass that the loss does not need.


@dataclass(frozen=True)
class GroupMeta:
    """One group for the trainer. A rank also gets the trajectories of those tickets whose images it trains."""

    group: int  # Number of the group in its step.
    tickets: int  # Number of its tickets.
    version: int  # Version of the weights that made its images.
    age: int  # Staleness: training step minus `version`.
    advantages: tuple[float, ...]  # One per image of the group, in image order.
    # Indices of the images that are trained, in order (Algorithm.select), cut into parts (parts.py).
    parts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]  # One seed per image, for algorithms that draw random numbers in the trainer.
    negative: EncoderInput  # Its negative prompt, which `set_negatives` must have got before; unused without guidance.
    sampling: Sampling  # Sampling of its images; the trainer uses the same guidance and resolution.
    teacher: str = ""  # Label of the teacher of its prompt, of those in `algorithm.teachers`; empty: no teacher.
    # Trained level → means over the group of what `Algorithm.group_terms` gives; empty: the group is one part.
    means: tuple[tuple[float, ...], ...] = ()
    prompt: Prompt | None = None  # For algorithms with `differentiates_reward`; None for others.
    # The rank that trains each of its parts, in order; empty: the rank that gets the request trains all of them.
    owners: tuple[int, ...] = ()

    @property
    def selected(self) -> tuple[int, ...]:
        return tuple(image for part in self.parts for image in part)


# (group, part) → for each trained level the sums of `Algorithm.group_terms` over the images of the part.
GroupSums = dict[tuple[int, int], list[list[float]]]


def with_means(meta: GroupMeta, sums: GroupSums) -> GroupMeta:
    """Returns the group with its `means`; parts are added in order, so that their owners change nothing."""
    by_level = zip(*(sums[meta.group, part] for part in range(len(meta.parts))), strict=True)
    images = len(meta.selected)
    means = [tuple(sum(terms) / images for terms in zip(*of_parts, strict=True)) for of_parts in by_level]
    return replace(meta, means=tuple(means))


@dataclass(frozen=True)
class TrainRequest:
    """One call to a trainer rank, `train` or `add_up`: it may begin an optimizer step, train groups, or add up."""

    step: int  # Training step.
    # Groups to train on, by ascending number; their trajectories are passed beside the request, in ticket order.
    metas: tuple[GroupMeta, ...]
    begins: StepPlan | None = None  # If set, the request begins this optimizer step.
    # For each group the positions of the tickets whose trajectories are passed; empty means all tickets.
    tickets: tuple[tuple[int, ...], ...] = ()
    # For `add_up`: (number, parts) of each group that all ranks have trained; None: those that this rank got.
    planned: tuple[tuple[int, int], ...] | None = None
    # For `add_up`: the number of trained rows, by which the sum of losses is divided in place of `StepPlan.rows`;
    # None: that number is kept.
    rows: int | None = None
    # For `add_up`: the group on which every rank measures how far the step moves the policy. The trajectories of its
    # first part are passed after all others. None: a rank that trains alone takes the lowest group that it got.
    probe: GroupMeta | None = None
    probe_tickets: tuple[int, ...] = ()  # The positions of the tickets of `probe` whose trajectories are passed.
    attempt: int = 0  # For `add_up`: `StepPlan.attempt` of the step.
    # Another call follows as soon as this one is answered: a worker that samples, too, begins no ticket before it.
    more: bool = False

    def split(self) -> "list[TrainRequest]":
        """Returns requests with one group each, which together do the same."""
        return [
            replace(self, metas=(meta,), begins=self.begins if index == 0 else None, tickets=())
            for index, meta in enumerate(self.metas)
        ]


@dataclass(frozen=True)
class Manifest:
    """The contents of one rank's sum of gradients."""

    step: int
    update: int
    attempt: int  # `StepPlan.attempt` of the plan with which the sum began.
    parts: tuple[tuple[int, int], ...]  # (group, part) of each gradient in the sum, in the order of the additions.


@dataclass(frozen=True)
class PartStats:
    """Statistics of one part of a group, from the rank that trained it."""

    group: int
    part: int
    age: int
    window_start: int  # Index of the first trained denoising step.
    rows: int  # Number of trained rows.
    sums: Mapping[str, float]  # Sums over its rows of the metrics of the algorithm's loss.
    # Squared L2 norm of its gradient, before the division by the number of rows of the step. NaN where no rank has that
    # gradient (tune=full with shard=full); `gradient_snr` is left out then.
    squared: float


@dataclass(frozen=True)
class UpdateStats:
    """Statistics of one optimizer step, first of each rank, then merged over ranks (`merged`)."""

    step: int
    update: int
    skipped: bool  # True: there was no group to train on, so the optimizer did not run.
    # By the names of metrics.jsonl: lr, grad_norm and others from each rank; loss, ratio/mean, kl and others after
    # merging.
    metrics: Mapping[str, float]
    # Staleness → (rows with nonzero advantage whose gradient was not cut, all rows with nonzero advantage); merged.
    kept: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()  # Parts of the rank's time.
    parts: tuple[PartStats, ...] = ()  # Statistics of the parts that the rank trained; merged: of all parts.
    rows: int = 0  # `StepPlan.rows`.
    # True if the movement of the policy is measured in the next optimizer step; several ranks then need
    # `TrainRequest.probe`.
    measures_next: bool = True
    fetched: tuple[int, ...] = ()  # Bytes of each trajectory that this rank got for this optimizer step.
    digest: str = ""  # Fingerprint of the trained weights after the step, equal on all ranks.
    # Seconds for which the end of the step waited for tickets that the rank's process makes; merged: the longest. None
    # if its process makes no tickets.
    waited: float | None = None


def arrived(*payloads: object) -> None:
    """Does nothing. Called in a worker with references as arguments, it returns when their values have arrived."""


_NAMES = {"ratio": "ratio/mean"}  # Name of an algorithm's metric → its name in metrics.jsonl, if they differ.
# Name in metrics.jsonl → an algorithm's counts of rows of which it is the quotient.
_SHARES = {f"gradient_kept/{sign}": (f"kept_{sign}", f"rows_{sign}") for sign in ("positive", "negative")}
_COUNTS = {"kept", "nonzero", *(name for pair in _SHARES.values() for name in pair)}


def merged(ranks: Sequence[UpdateStats]) -> UpdateStats:
    """Returns the statistics of the whole step, summed by group and part, so that the number of ranks changes nothing.

    Spans, and without trained parts all statistics, are the first rank's. `ranks` has at least one.
    """
    waits = [stats.waited for stats in ranks if stats.waited is not None]
    first = replace(ranks[0], waited=max(waits, default=None))
    parts = sorted((part for stats in ranks for part in stats.parts), key=lambda part: (part.group, part.part))
    if not parts:
        return first
    parts = _probed_once(parts)
    metrics = {**row_means(parts, first.rows), **first.metrics}
    metrics |= signal_to_noise([part.squared / first.rows**2 for part in parts], metrics["grad_norm"])
    return replace(first, metrics=metrics, kept=_kept(parts), parts=tuple(parts))


def _probed_once(parts: Sequence[PartStats]) -> list[PartStats]:
    lowest = min(part.group for part in parts)
    return [
        part if part.group == lowest else replace(part, sums={n: v for n, v in part.sums.items() if n != GAP})
        for part in parts
    ]


def signal_to_noise(squares: Sequence[float], norm: float) -> dict[str, float]:
    """Returns {"gradient_snr": n² m² / (n v)}, or {} for a single part and if no noise is left.

    For n parts of mean m and noise of variance v, E|sum|² = n² m² + n v and E sum|part|² = n m² + n v.
    """
    pieces = len(squares)
    if pieces < 2:
        return {}
    noise = (math.fsum(squares) - norm * norm / pieces) * pieces / (pieces - 1)
    return {"gradient_snr": norm * norm / noise - 1.0} if noise > 0.0 else {}


def row_means(parts: Sequence[PartStats], denominator: int) -> dict[str, float]:
    """Returns means over all trained rows; only `loss` is its sum divided by `denominator`, as in training."""
    named = {}
    for name in sorted({name for part in parts for name in part.sums}):
        having = [part for part in parts if name in part.sums]
        total = sum(part.sums[name] for part in having)
        if name == "loss":
            named["loss"] = total / denominator
        elif name not in _COUNTS:
            named[_NAMES.get(name, name)] = total / sum(part.rows for part in having)
    for share, (some, of) in _SHARES.items():
        if rows := sum(part.sums.get(of, 0.0) for part in parts):
            named[share] = sum(part.sums.get(some, 0.0) for part in parts) / rows
    return named


def _kept(parts: Sequence[PartStats]) -> Mapping[int, tuple[int, int]]:
    by_age: dict[int, tuple[int, int]] = {}
    for part in parts:
        kept, nonzero = by_age.get(part.age, (0, 0))
        by_age[part.age] = kept + round(part.sums.get("kept", 0.0)), nonzero + round(part.sums.get("nonzero", 0.0))
    return by_age
