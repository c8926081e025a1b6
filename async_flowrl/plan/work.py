"""Work of a training step, layout of devices, and the closed forms that bound the one on the other."""

from dataclasses import dataclass, field, fields, replace

from async_flowrl.config.schema import Config, DeadlinesConfig, mode_name
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
    """Images per group: trainer ranks must divide it; 0 = any number of ranks."""
    finish: Law = field(default_factory=lambda: Law(0.0))
    """End of an update, after its last group."""
    score: Law = field(default_factory=lambda: Law(0.0))
    """Rewards of one group on one reward worker."""
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
        return self.update.scaled(self.serial + (1.0 - self.serial) / ranks)

    def allows(self, ranks: int) -> bool:
        return self.group_size == 0 or self.group_size % ranks == 0


@dataclass(frozen=True)
class Layout:
    """Workers per pool, and how far generation may run ahead."""

    rollout: int
    trainer: int
    reward: int = 1
    max_staleness: int = 1
    hand_over: str = "stream"
    slow: tuple[float, ...] = ()
    """Factors on the durations of the first rollout workers; the others are as fast as measured."""

    @property
    def mode(self) -> str:
        return mode_name(self.max_staleness, self.hand_over)

    def slowness(self, index: int) -> float:
        return self.slow[index] if index < len(self.slow) else 1.0

    def with_staleness(self, max_staleness: int, hand_over: str) -> "Layout":
        return replace(self, max_staleness=max_staleness, hand_over=hand_over)


@dataclass(frozen=True)
class Bounds:
    """Seconds per step that each stage needs if it never waits."""

    generation: float
    update: float
    reward: float

    @property
    def overlapped(self) -> float:
        """max(G, T, R): no schedule of these pools takes less per step."""
        return max(self.generation, self.update, self.reward)


def bounds(work: Work, layout: Layout) -> Bounds:
    """The closed forms. Rollout workers share the tickets by their speeds; the update includes what its end costs."""
    speed = sum(1.0 / layout.slowness(index) for index in range(layout.rollout))
    update = work.prompts_per_step * work.update_on(layout.trainer).mean + work.finish.mean
    return Bounds(
        generation=work.tickets_per_step * work.generate.mean / speed,
        update=update + work.stage.mean,
        reward=work.prompts_per_step * work.score.mean / layout.reward,
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
    config.rollout.num_workers, config.reward.num_workers = layout.rollout, layout.reward
    config.trainer.num_workers = layout.trainer
    config.deadlines = DeadlinesConfig(**{deadline.name: UNREACHED_SECONDS for deadline in fields(DeadlinesConfig)})
    return config
