"""The sections `monitor` and `profile` of the configuration: records of the run, for people and tools."""

from dataclasses import dataclass, field

from async_flowrl.config.settings import setting


@dataclass
class MonitorConfig:
    """Trackers and the report, besides the console and the files of the run directory."""

    tensorboard: bool = False
    """Write TensorBoard files to the run directory."""
    wandb: bool = False
    """Use Weights & Biases; offline without WANDB_API_KEY and without a login."""
    wandb_project: str = "async_flowrl"
    """Project of the run at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team at Weights & Biases; null = the account's own."""
    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the run at Weights & Biases."""
    metric_aliases: str = setting("none", choices=("none", "verl_omni"))
    """verl_omni: trackers also get metrics under verl-omni's names, if it has the same ones; metrics.jsonl does not
    change."""
    report: bool = True
    """Write report.html at the end of the run."""
    report_mib: float = setting(16.0, at_least=0)
    """MiB of images in report.html; further images are left out, and the page says so."""
    kept_images: int = setting(4, at_least=0)
    """Images of each evaluated prompt that are saved as files in images/step_N/, for the report; 0 = none."""
    kept_side: int = setting(512, at_least=16)
    """Pixels of the longest side of these files; larger images are reduced."""


@dataclass
class ProfileConfig:
    """Traces of torch's profiler."""

    steps: list[int] = field(default_factory=list)
    """Training steps of which every worker traces the rollout tickets and the update with torch's profiler, to
    profile/. Traces do not change the weights, but a resumed run must have the same list."""
