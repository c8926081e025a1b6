"""Messages between the controller and a trainer rank. Small, frozen, picklable; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from async_flowrl.types import Sampling, Span, Wording


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `rows` is its full count of (sample, denoising step) rows over all ranks, skipped groups
    included: the denominator of the loss, so that a skipped group weighs as much as one whose gradient is zero."""

    rows: int
    update: int = 0
    """Which optimizer step of the batch this is; from the second on, every group needs its proximal predictions."""
    probe: bool = True
    """Recompute one micro-batch under the weights that sampled it, to compare its log-probs with the rollout's."""


@dataclass(frozen=True)
class GroupMeta:
    """One prompt group as it is handed over; its tickets' trajectories travel beside it, in ticket order."""

    group: int
    """Index in the step; it names the group in errors and statistics."""
    tickets: int
    """How many of the trajectories passed along are this group's."""
    version: int
    """Policy version that sampled it."""
    age: int
    """Policy versions between the sampler and the trainer."""
    advantages: tuple[float, ...]
    """One per image of the group, in image order."""
    selected: tuple[int, ...]
    """Which images are trained, in order (Algorithm.select)."""
    seeds: tuple[int, ...]
    """A named seed per image, for algorithms that draw in the trainer."""
    negative: Wording
    """Its negative prompt, a key of what `set_negatives` was given; unused without guidance."""
    sampling: Sampling
    """How it was sampled: guidance and resolution must be the trainer's too."""
    owners: tuple[int, ...] = ()
    """The rank that trains each of its parts (see `parts.py`), in order; empty: whoever is asked trains all of them."""


@dataclass(frozen=True)
class TrainRequest:
    """One call to a trainer rank. Where all groups of an optimizer step are ready, one call is the whole step."""

    step: int
    metas: tuple[GroupMeta, ...]
    """Groups to train on, in order; their trajectories travel beside the request, in ticket order."""
    begins: StepPlan | None = None
    """Set on the first request of a step: it begins the optimizer step."""
    finishes: bool = False
    """True for the last one: it ends the optimizer step."""

    def split(self) -> "list[TrainRequest]":
        """The same, group by group."""
        last = len(self.metas) - 1
        return [
            TrainRequest(self.step, (meta,), self.begins if index == 0 else None, self.finishes and index == last)
            for index, meta in enumerate(self.metas)
        ]


@dataclass(frozen=True)
class GroupStats:
    """Means over one group's trained rows of what the algorithm's loss reported."""

    group: int
    version: int
    age: int
    window_start: int
    rows: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class PartStats:
    """One part of a group, from the rank that trained it."""

    group: int
    part: int
    version: int
    age: int
    window_start: int
    rows: int
    sums: Mapping[str, float]
    """Sums over its rows of what the algorithm's loss reported."""
    squared: float
    """Squared L2 norm of its gradient, before the division by the rows of the step."""


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer step did; of a rank, equal on all but for `parts` and `spans`, until they are merged."""

    step: int
    update: int
    skipped: bool
    """No group was left to train on, so the optimizer did not run."""
    metrics: Mapping[str, float]
    """By the names of metrics.jsonl: loss, grad_norm, lr, ratio/mean, clip_fraction, kl, log_prob_gap, ..."""
    kept: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Per age: rows with a nonzero advantage whose gradient survived clip and mask, and all rows with one."""
    groups: tuple[GroupStats, ...] = ()
    spans: tuple[Span, ...] = ()
    parts: tuple[PartStats, ...] = ()
    rows: int = 0
    """The plan's."""
    overflow: int | None = None
    """The sum could have left its range with this exponent: nothing was changed, and the step is to be begun again."""


def arrived(*payloads: object) -> None:
    """Run in a worker with refs as arguments: returns once it has their values, so that the next call finds them."""
