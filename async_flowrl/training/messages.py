"""Messages between the controller and a trainer rank. Small, frozen, picklable; no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from async_flowrl.config.schema import TrainerConfig
from async_flowrl.types import Sampling, Span, Trajectory, Wording


@dataclass(frozen=True)
class Layout:
    """How trainer ranks hold the base and what they recompute, by the settings of `trainer`."""

    shard: str
    shard_size: int | None
    gradient_checkpointing: str

    @classmethod
    def named(cls, trainer: TrainerConfig) -> "Layout":
        """As the configuration has it, `auto` included."""
        return cls(trainer.shard, trainer.shard_size, trainer.gradient_checkpointing)

    def applied(self, trainer: TrainerConfig) -> TrainerConfig:
        """A copy of the settings with this layout."""
        return replace(trainer, **asdict(self))

    def in_shard(self) -> str:
        return f"hybrid over {self.shard_size} ranks" if self.shard == "hybrid" else self.shard

    def in_words(self) -> str:
        return f"shard={self.in_shard()} and gradient_checkpointing={self.gradient_checkpointing}"


GAP = "behaviour_gap"
"""A number of the probed part alone: what two engines disagree by."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `rows` is its full count of (sample, denoising step) rows over all ranks, skipped groups
    included: the denominator of the loss, so that a skipped group weighs as much as one whose gradient is zero."""

    rows: int
    update: int = 0
    """Which optimizer step of the batch this is; from the second on, every group needs its proximal predictions."""
    attempt: int = 0
    """Rises with every beginning of an optimizer step: a sum that was begun in an earlier one is worth nothing."""
    probe: bool = True
    """Recompute one micro-batch under the weights that sampled it, to compare its log-probs with the rollout's."""

    def probes(self, records: str) -> bool:
        """Whether that is done in this optimizer step of an algorithm that trains on such records."""
        return self.probe and self.update == 0 and records == "transitions"


@dataclass(frozen=True)
class GroupMeta:
    """One prompt group as it is handed over; its tickets' trajectories travel beside it, in ticket order.

    A rank gets those of them that hold the images it trains."""

    group: int
    """Index in the step; it names the group in errors and statistics."""
    tickets: int
    """How many tickets it was made in."""
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
    """Groups to train on, by rising number; their trajectories travel beside the request, in ticket order."""
    begins: StepPlan | None = None
    """Set on the first request of a step: it begins the optimizer step."""
    finishes: bool = False
    """True for the last one: it ends the optimizer step."""
    tickets: tuple[tuple[int, ...], ...] = ()
    """Of each group, the tickets whose trajectories came along, by their place in it; empty: all of every group."""
    planned: tuple[tuple[int, int], ...] | None = None
    """With `finishes`: number and parts of every group that all ranks have trained; None: what this one was given."""
    probe: GroupMeta | None = None
    """With `finishes`: the lowest of these groups, on which every rank measures the step; the trajectories of the first
    part come along after the others. None: a rank that trains alone measures on the lowest it was given."""
    probe_tickets: tuple[int, ...] = ()
    """The tickets of `probe` that came along."""
    attempt: int = 0
    """With `finishes`: the plan's."""

    def split(self) -> "list[TrainRequest]":
        """The same, group by group."""
        last = len(self.metas) - 1
        return [
            replace(
                self,
                metas=(meta,),
                begins=self.begins if index == 0 else None,
                finishes=self.finishes and index == last,
                tickets=(),
            )
            for index, meta in enumerate(self.metas)
        ]


@dataclass(frozen=True)
class Manifest:
    """What is in the sum of one rank that was not collected yet."""

    step: int
    update: int
    attempt: int
    """The plan's that the sum was begun with."""
    parts: tuple[tuple[int, int], ...]
    """Group and part of every contribution, in the order they were added."""


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
class Summed:
    """The ranks' sums were added up on this rank; its own is untouched, and nothing has stepped."""

    overflow: int | None
    """The sum could have left its range with this exponent: the step is to be begun again."""
    parts: tuple[PartStats, ...]
    """Those that this rank has trained."""


@dataclass(frozen=True)
class Fetched:
    """Trajectories that a rank was given, and their bytes."""

    tickets: int = 0
    bytes: int = 0

    def plus(self, trajectories: Sequence[Trajectory]) -> "Fetched":
        return Fetched(self.tickets + len(trajectories), self.bytes + sum(map(nbytes, trajectories)))


def nbytes(trajectory: Trajectory) -> int:
    """Bytes of a trajectory's arrays."""
    arrays = (trajectory.latents, trajectory.log_probs, trajectory.sigmas, *trajectory.conditioning.values())
    return sum(array.nbytes for array in arrays)


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
    measures_next: bool = True
    """Whether the next optimizer step is measured, for which several ranks need `TrainRequest.probe`."""
    fetched: Fetched = Fetched()
    """What this rank was given for this optimizer step."""
    digest: str = ""
    """Of the trained weights after it, the same on every rank."""


def arrived(*payloads: object) -> None:
    """Run in a worker with refs as arguments: returns once it has their values, so that the next call finds them."""
