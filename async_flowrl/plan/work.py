"""Inputs of a plan: the `Work` of a training step, the `Layout` of workers, and lower bounds of the step time.

`calibrate` and `command` make a `Work`, `advise` tries layouts for it, and `simulate` runs it.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from async_flowrl.config.reward_pools import SHARED
from async_flowrl.config.schema import Config, mode_name
from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.config.sections.runtime import DeadlinesConfig
from async_flowrl.config.shared import SHARED as ONE_POOL
from async_flowrl.plan.laws import Law
from async_flowrl.tickets.ticket import EVALUATION_EVERY_TICKETS

HAND_OVERS = ("batch", "stream")
SEPARATE = "separate"
"""Value of `Layout.placement`, beside ONE_POOL."""
UNREACHED_SECONDS = 1e12
"""Deadline of a simulated run; no simulation lasts so long."""


@dataclass(frozen=True)
class EvaluationWork:
    """Work of the evaluations of a run."""

    every: int
    """Training steps between two evaluations."""
    tickets: int
    """Tickets of one evaluation, one for each evaluation prompt."""
    generate: Law
    """Duration of one such ticket on one rollout worker."""


@dataclass(frozen=True)
class Work:
    """Work of one training step, independent of the layout. Every `Law` is a distribution of seconds."""

    prompts_per_step: int
    generate: Law
    """Duration of one ticket on one rollout worker, including the decoding of its images.

    With `tickets_per_batch` above 1 it is the duration of a batch divided by its tickets.
    """
    update: Law
    """Duration of forward and backward passes of one group on a single trainer rank."""
    tickets_per_group: int = 1
    tickets_per_batch: int = 1
    """Tickets that a rollout worker makes in one call (`rollout.tickets_per_batch`)."""
    costs: tuple[float, ...] = ()
    """Relative durations of groups whose images have different sizes, with a mean of 1; empty if all are alike. They
    multiply `generate` and `update`, which are means over all sizes."""
    cost_shares: tuple[float, ...] = ()
    """Share of the groups that has each of `costs`; empty if all shares are equal."""
    group_size: int = 0
    """Images per group; 0 means unknown."""
    parts: int = 0
    """Micro-batches per optimizer step, none of which is split among ranks; 0 means unknown."""
    finish: Law = field(default_factory=lambda: Law(0.0))
    """Duration of the end of an update, after its last group (the optimizer)."""
    score: Law = field(default_factory=lambda: Law(0.0))
    """Duration of scoring one group on one worker of the shared reward pool."""
    own_scores: Mapping[str, Law] = field(default_factory=dict, hash=False)
    """Pool name (`reward/X`) → duration of scoring one group, for pools that score a single reward term X."""
    stage: Law = field(default_factory=lambda: Law(0.0))
    """Time that the trainer loses between two updates: the copy for sending, and bookkeeping."""
    deliver: Law = field(default_factory=lambda: Law(0.0))
    """Time from the end of staging until a worker holds the new version."""
    serial: float = 0.0
    """Share of `update`, from 0 to 1, that more ranks do not make shorter."""
    ticket_bytes: int = 0
    """Bytes of one ticket's images and trajectory in the object store."""
    adapter_bytes: int = 0
    """Bytes of one version."""
    evaluation: EvaluationWork | None = None
    """Evaluations during training; None without. The baseline, and evaluations before and after training, are left
    out."""

    @property
    def evaluation_tickets(self) -> float:
        """Evaluation tickets that every training step certainly makes, on average.

        They are at most one in EVALUATION_EVERY_TICKETS of all tickets; more are made when workers have nothing else.
        """
        if self.evaluation is None:
            return 0.0
        return min(
            self.evaluation.tickets / self.evaluation.every, self.tickets_per_step / (EVALUATION_EVERY_TICKETS - 1)
        )

    @property
    def evaluation_seconds(self) -> float:
        """Device-seconds per training step of these tickets."""
        return self.evaluation_tickets * self.evaluation.generate.mean if self.evaluation else 0.0

    @property
    def generation_seconds(self) -> float:
        """Device-seconds per training step of all its tickets, these of evaluations included."""
        return self.tickets_per_step * self.generate.mean + self.evaluation_seconds

    @property
    def tickets_per_step(self) -> int:
        return self.prompts_per_step * self.tickets_per_group

    def update_on(self, ranks: int) -> Law:
        """Returns the duration of one group's passes on `ranks` ranks, by Amdahl's law with the share `serial`."""
        return self.update.scaled(self.serial + (1.0 - self.serial) * largest_share(self.parts, ranks))

    def cost(self, seed: int, step: int, group: int) -> float:
        """Returns the relative duration of a group's tickets and update; every group draws its own."""
        if not self.costs:
            return 1.0
        return random.Random(f"{seed}/cost/{step}/{group}").choices(self.costs, self.cost_shares or None)[0]

    def score_in(self, pool: str) -> Law:
        """Returns the duration of scoring one group on one worker of the reward pool `pool`."""
        return self.score if pool == SHARED else self.own_scores[pool]


def largest_share(parts: int, ranks: int) -> float:
    """Returns the share of an optimizer step that the rank with the most micro-batches computes.

    With `parts` of 0 (unknown) the ranks share the step evenly.
    """
    return -(-parts // ranks) / parts if parts else 1.0 / ranks


@dataclass(frozen=True)
class Layout:
    """Workers per pool, and how many versions generation may run ahead of training."""

    rollout: int
    trainer: int
    reward: int = 1
    """Workers of the shared reward pool; 0 if every reward term has a pool of its own."""
    max_staleness: int = 1
    hand_over: str = "stream"
    """`batch`: the trainer waits for all groups of a step; `stream`: it takes each group as soon as it is ready."""
    slow: tuple[float, ...] = ()
    """Factors on the ticket durations of the first rollout workers; all further workers have factor 1."""
    own_rewards: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Pool name (`reward/X`) → workers, for pools that score a single reward term X."""
    placement: str = SEPARATE
    """`separate`, or `shared`, with which every process samples and trains.

    With `shared`, `rollout` and `trainer` are both the number of devices.
    """

    @property
    def devices(self) -> int:
        """Devices of rollout and training together; those of rewards are not counted."""
        return self.rollout + self.trainer if self.placement == SEPARATE else self.trainer

    @property
    def mode(self) -> str:
        return mode_name(self.max_staleness, self.hand_over)

    @property
    def reward_workers(self) -> dict[str, int]:
        """Reward pool → number of its workers."""
        return ({SHARED: self.reward} if self.reward else {}) | dict(self.own_rewards)

    def slowness(self, index: int) -> float:
        return self.slow[index] if index < len(self.slow) else 1.0

    def with_staleness(self, max_staleness: int, hand_over: str) -> "Layout":
        return replace(self, max_staleness=max_staleness, hand_over=hand_over)


@dataclass(frozen=True)
class Bounds:
    """Seconds per step that each pool needs if it never waits."""

    generation: float
    update: float
    rewards: Mapping[str, float]
    """Reward pool → seconds per step."""
    together: bool = False
    """True if the same devices generate and train, so that the seconds of both add up."""

    @property
    def reward(self) -> float:
        """Seconds per step of the slowest reward pool; 0 without reward pools."""
        return max(self.rewards.values(), default=0.0)

    @property
    def without_rewards(self) -> float:
        """max(G, T): seconds per step of the slower of generation and training; their sum if they share devices."""
        return self.generation + self.update if self.together else max(self.generation, self.update)

    @property
    def overlapped(self) -> float:
        """max(G, T, R), or max(G + T, R), with R = `reward`: no schedule of these pools takes less."""
        return max(self.without_rewards, self.reward)


def bounds(work: Work, layout: Layout) -> Bounds:
    """Computes the bounds from the mean durations.

    Rollout workers share the tickets, those of evaluations included, in proportion to their speeds. `update` includes
    `finish` and `stage`, but with `placement=shared` not `stage`, because the device generates images during it.
    """
    speed = sum(1.0 / layout.slowness(index) for index in range(layout.rollout))
    one_pool = layout.placement == ONE_POOL
    # With one pool, a rank that has fewer parts than others generates images instead of waiting for them.
    per_group = replace(work, parts=0).update_on(layout.trainer) if one_pool else work.update_on(layout.trainer)
    return Bounds(
        generation=work.generation_seconds / speed,
        update=work.prompts_per_step * per_group.mean + work.finish.mean + (0.0 if one_pool else work.stage.mean),
        together=layout.placement != SEPARATE,
        rewards={
            pool: (work.prompts_per_step + work.evaluation_tickets) * work.score_in(pool).mean / size
            for pool, size in layout.reward_workers.items()
        },
    )


def balance(generation: float, update: float, devices: int) -> float:
    """Returns the share of `devices` (at least 2) that the best whole-number split keeps busy, from 0 to 1.

    `generation` and `update` are device-seconds per step.
    """
    ideal = (generation + update) / devices
    best = min(max(generation / n, update / (devices - n)) for n in range(1, devices))
    return ideal / best


def images_of(work: Work) -> int:
    """Returns the images per group in a simulation: at least two per ticket."""
    return work.tickets_per_group * max(2, max(2, work.group_size) // work.tickets_per_group)


def parts_of_group(work: Work) -> int:
    """Returns the micro-batches in which a group is trained, at most one per image."""
    return max(1, min(images_of(work), work.parts // work.prompts_per_step))


def config_of(work: Work, layout: Layout, steps: int) -> Config:
    """Returns the configuration with which the real controller runs in a simulation."""
    config = Config(total_steps=steps, prompts_per_step=work.prompts_per_step, group_size=images_of(work))
    config.placement = layout.placement
    config.trainer.micro_batch_size = -(-config.group_size // parts_of_group(work)) if work.parts else 1
    config.ticket_size = config.group_size // work.tickets_per_group
    config.rollout.tickets_per_batch = work.tickets_per_batch
    config.max_staleness, config.hand_over = layout.max_staleness, layout.hand_over
    config.rollout.num_workers, config.reward.num_workers = layout.rollout, max(1, layout.reward)
    config.trainer.num_workers = layout.trainer
    shared = {SHARED: RewardTerm()} if layout.reward else {}
    own = {pool.removeprefix(f"{SHARED}/"): RewardTerm(workers=size) for pool, size in layout.own_rewards.items()}
    config.reward.terms = shared | own
    config.deadlines = DeadlinesConfig(**{deadline.name: UNREACHED_SECONDS for deadline in fields(DeadlinesConfig)})
    return config
