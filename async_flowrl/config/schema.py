"""The configuration: a tree of dataclasses, registered with Hydra as `schema`.

The text under a field says what it means, with its unit; `setting` adds the values that it takes and what changing it
does. docs/write_configuration.py copies all of it to docs/configuration.md.
"""

from dataclasses import dataclass, field

from async_flowrl.config.sections.algorithm import AlgorithmConfig
from async_flowrl.config.sections.checkpoint_engine import CheckpointEngineConfig
from async_flowrl.config.sections.data import DataConfig
from async_flowrl.config.sections.evaluate import EvaluateConfig
from async_flowrl.config.sections.model import ModelConfig
from async_flowrl.config.sections.monitor import MonitorConfig, ProfileConfig
from async_flowrl.config.sections.reward import RewardConfig
from async_flowrl.config.sections.rollout import RolloutConfig
from async_flowrl.config.sections.runtime import DeadlinesConfig, HardwareConfig, LimitsConfig, RuntimeConfig
from async_flowrl.config.sections.save import SaveConfig
from async_flowrl.config.sections.trainer import TrainerConfig
from async_flowrl.config.sections.tune import FULL, LORA, FullConfig, LoraConfig
from async_flowrl.config.settings import FREE, MAX_SEED, NOTHING, ROUNDING, setting


@dataclass
class Config:
    name: str = setting("one_step_off", changes=NOTHING)
    """Name of the run: part of output_dir, and shown by monitors."""
    output_dir: str = setting("outputs/${name}", changes=NOTHING)
    """Run directory: everything the run writes. A new run wants it empty."""
    deterministic: bool = setting(True, changes=ROUNDING)
    """true: rollout and trainer use only kernels that give the same bits for the same input. false: also faster ones on
    GPUs; then a run cannot be repeated bit for bit."""
    seed: int = setting(0, at_least=0, at_most=MAX_SEED)
    """Seed of every random draw of the training: prompts, noise, windows, the LoRA's initial weights."""
    mode: str | None = setting(None, choices=("sync", "stream", "one_step_off", "fully_async"), changes=NOTHING)
    """Name of the mode that max_staleness and hand_over make; if it is given, they must agree with it. null = no
    check."""
    total_steps: int = setting(100, at_least=1)
    """Training steps; in each, prompts_per_step * group_size images are generated, scored and trained on. With
    lr_schedule=constant a run may be resumed with more of them."""
    epochs: int | None = setting(None, at_least=1, changes=NOTHING)
    """Passes over the training prompts after which the run ends, unless total_steps ends it before; null = no limit."""
    prompts_per_step: int = setting(2, at_least=1)
    """Prompts per training step, one group of images each."""
    group_size: int = setting(16, at_least=2)
    """Images per prompt: their rewards are compared with each other."""
    ticket_size: int | None = setting(None, at_least=1, changes=ROUNDING)
    """Images per ticket, the work that a rollout worker gets at a time; must divide group_size; null = group_size."""
    max_staleness: int = setting(1, at_least=0)
    """Policy versions by which an image may be older than the weights it trains: images of step s are made with version
    max(0, s - max_staleness). 0: only fresh images, so generation waits for the update. 1: the images of the next step
    are made during an update. Each further one lets generation run one more step ahead and keeps one more version in
    memory."""
    hand_over: str = setting("batch", choices=("batch", "stream"), changes=NOTHING)
    """batch: training begins when all tickets of the step are ready. stream: each group is trained when it is ready."""
    resume: str = setting("never", changes=NOTHING)
    """never; auto: from the newest checkpoint in output_dir; force: the same, but other prompts or another
    configuration than the checkpoint's give a warning instead of an error; or the path of a checkpoint."""
    placement: str = setting("separate", choices=("separate", "shared"), changes=NOTHING)
    """separate: rollout and trainer have their own devices. shared: each process samples and trains, whichever is next,
    on one copy of the base."""
    time_limit: float | None = setting(None, above=0, infinite=True, changes=NOTHING)
    """Seconds after which the run writes a checkpoint and exits with the code for a resumable run; null = no limit."""
    allow_oom: bool = setting(False, changes=NOTHING)
    """Start even if weights, optimizer and versions alone are larger than the device's memory, or what a node's
    processes certainly need than the node's memory."""
    dry_run: bool = setting(False, changes=NOTHING)
    """Compose and check the configuration, print the plan, and stop."""
    preflight: bool = setting(False, changes=NOTHING)
    """First check every node as `async-flowrl doctor` does, and start nothing if a check fails."""
    console: str = setting("auto", choices=("auto", "bar", "lines", "quiet"), changes=NOTHING)
    """Output of the run on stdout. bar: a progress bar. lines: one plain line per step. quiet: only warnings, errors
    and the reason of an early end. auto: bar on a terminal, else lines."""
    tune: str = setting(LORA, choices=(LORA, FULL))
    """The weights that are trained: lora (a LoRA) or full (the transformer's own weights; see
    docs/do/full_weights.md)."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    full: FullConfig = field(default_factory=FullConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint_engine: CheckpointEngineConfig = field(default_factory=CheckpointEngineConfig, metadata=FREE)
    save: SaveConfig = field(default_factory=SaveConfig, metadata=FREE)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=FREE)
    monitor: MonitorConfig = field(default_factory=MonitorConfig, metadata=FREE)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig, metadata=FREE)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig, metadata=FREE)
    limits: LimitsConfig = field(default_factory=LimitsConfig, metadata=FREE)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig, metadata=FREE)

    @property
    def mode_name(self) -> str:
        """The name of the mode, also if `mode` is null."""
        return mode_name(self.max_staleness, self.hand_over)

    @property
    def images_per_ticket(self) -> int:
        """`ticket_size`, or `group_size` if it is null."""
        return self.ticket_size or self.group_size

    @property
    def live_versions(self) -> int:
        """Number of versions that unfinished tickets can need: the newest one and max_staleness before it."""
        return self.max_staleness + 1

    @property
    def versions_on_host(self) -> bool:
        """Whether rollout workers keep their versions in host memory (`rollout.versions_on`)."""
        where = self.rollout.versions_on
        return where == "host" or (where == "auto" and self.tune == FULL)


def mode_name(max_staleness: int, hand_over: str) -> str:
    """Returns the name of the mode for these two settings."""
    if max_staleness == 0:
        return "sync" if hand_over == "batch" else "stream"
    return "one_step_off" if max_staleness == 1 else "fully_async"
