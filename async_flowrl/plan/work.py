"""Work of a training step, layout of devices, and the closed forms that bound the one on the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from async_flowrl.config.reward_pools import SHARED
from async_flowrl.config.schema import Config, DeadlinesConfig, RewardTerm, mode_name
from async_flowrl.plan.laws import Law

HAND_OVERS = ("batch", "stream")
UNREACHED_SECONDS = 1e12
"""A deadline that no plan reaches."""


@dataclass(frozen=True)
class Work:
    """One training step's work, wherever it runs. Seconds and bytes."""

    prompts_per_step: int
    generate: Law
    """One ticket on one rollout worker, images decoded."""
    update: Law
    """Forward and backward of one group on a single trainer rank."""
    tickets_per_group: int = 1
    group_size: int = 0
    """Images per group, where they are known."""
    parts: int = 0
    """Parts that the groups of one optimizer step are cut into, where they are known: ranks share no less."""
    finish: Law = field(default_factory=lambda: Law(0.0))
    """End of an update, after its last group."""
    score: Law = field(default_factory=lambda: Law(0.0))
    """Rewards of one group on one worker of the shared reward pool."""
    own_scores: Mapping[str, Law] = field(default_factory=dict)
    """The same by reward pools of single terms (`reward/X`)."""
    stage: Law = field(default_factory=lambda: Law(0.0))
    """What the trainer waits for between two updates: the copy for sending, bookkeeping."""
    deliver: Law = field(default_factory=lambda: Law(0.0))
    """From there until a worker holds the new version."""
    serial: float = 0.0
    """Share of `update` that more ranks do not make shorter."""
    switch: float = 0.0
    """Seconds per step that colocated pools lose to handing the device over."""
    ticket_bytes: int = 0
    """Images and trajectory of one ticket in the object store."""
    adapter_bytes: int = 0
    """One version of the weights."""

    @property
    def tickets_per_step(self) -> int:
        return self.prompts_per_step * self.tickets_per_group

    def update_on(self, ranks: int) -> Law:
        """Forward and backward of one group shared by `ranks` ranks (Amdahl)."""
        return self.update.scaled(self.serial + (1.0 - self.serial) * largest_share(self.parts, ranks))

    def score_in(self, pool: str) -> Law:
        """Rewards of one group on one worker of a reward pool."""
        return self.score if pool == SHARED else self.own_scores[pool]


def largest_share(parts: int, ranks: int) -> float:
    """Share of an optimizer step that the rank with most of its parts computes; 0 parts: as fine as it takes."""
    return -(-parts // ranks) / parts if parts else 1.0 / ranks


@dataclass(frozen=True)
class Layout:
    """Workers per pool, and how far generation may run ahead."""

    rollout: int
    trainer: int
    reward: int = 1
    """Workers of the shared reward pool; 0 where every term has a pool of its own."""
    max_staleness: int = 1
    hand_over: str = "stream"
    slow: tuple[float, ...] = ()
    """Factors on the durations of the first rollout workers; the others are as fast as measured."""
    own_rewards: Mapping[str, int] = field(default_factory=dict)
    """Workers of the reward pools of single terms (`reward/X`)."""

    @property
    def mode(self) -> str:
        return mode_name(self.max_staleness, self.hand_over)

    @property
    def reward_workers(self) -> dict[str, int]:
        """Workers by reward pool."""
        return ({SHARED: self.reward} if self.reward else {}) | dict(self.own_rewards)

    def slowness(self, index: int) -> float:
        return self.slow[index] if index < len(self.slow) else 1.0

    def with_staleness(self, max_staleness: int, hand_over: str) -> "Layout":
        return replace(self, max_staleness=max_staleness, hand_over=hand_over)


@dataclass(frozen=True)
class Bounds:
    """Seconds per step that each stage needs if it never waits."""

    generation: float
    update: float
    rewards: Mapping[str, float]
    """By reward pool."""

    @property
    def reward(self) -> float:
        """Of the slowest reward pool."""
        return max(self.rewards.values(), default=0.0)

    @property
    def without_rewards(self) -> float:
        """max(G, T)."""
        return max(self.generation, self.update)

    @property
    def overlapped(self) -> float:
        """max(G, T, R): no schedule of these pools takes less per step."""
        return max(self.without_rewards, self.reward)


def bounds(work: Work, layout: Layout) -> Bounds:
    """The closed forms. Rollout workers share the tickets by their speeds; the update includes what its end costs."""
    speed = sum(1.0 / layout.slowness(index) for index in range(layout.rollout))
    update = work.prompts_per_step * work.update_on(layout.trainer).mean + work.finish.mean
    return Bounds(
        generation=work.tickets_per_step * work.generate.mean / speed,
        update=update + work.stage.mean,
        rewards={
            pool: work.prompts_per_step * work.score_in(pool).mean / size
            for pool, size in layout.reward_workers.items()
        },
    )


def balance(generation: float, update: float, devices: int) -> float:
    """Share of `devices` that the best whole-number split uses, for work of that many device-seconds per step."""
    ideal = (generation + update) / devices
    best = min(max(generation / n, update / (devices - n)) for n in range(1, devices))
    return ideal / best


def config_of(work: Work, layout: Layout, steps: int) -> Config:
    """The configuration that the real controller is run with."""
    config = Config(total_steps=steps, prompts_per_step=work.prompts_per_step, group_size=max(2, work.group_size))
    config.group_size = work.tickets_per_group * max(2, config.group_size // work.tickets_per_group)
    config.ticket_size = config.group_size // work.tickets_per_group
    config.max_staleness, config.hand_over = layout.max_staleness, layout.hand_over
    config.rollout.num_workers, config.reward.num_workers = layout.rollout, max(1, layout.reward)
    config.trainer.num_workers = layout.trainer
    shared = {SHARED: RewardTerm()} if layout.reward else {}
    own = {pool.removeprefix(f"{SHARED}/"): RewardTerm(workers=size) for pool, size in layout.own_rewards.items()}
    config.reward.terms = shared | own
    config.deadlines = DeadlinesConfig(**{deadline.name: UNREACHED_SECONDS for deadline in fields(DeadlinesConfig)})
    return config
