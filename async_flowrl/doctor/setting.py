"""Setting of the doctor's checks: the machine, the folders, and the sizes of the work."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

PRETENDED = "pretended"
"""Part of a device's name that marks a CPU acting as a GPU, with which these checks are tested."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the random model and of the work on it; the model's width is 128 channels times `heads`."""

    layers: int
    heads: int
    resolution: int
    """Pixels along each side of an image."""
    num_inference_steps: int
    group_size: int
    lora_rank: int
    adapter_megabytes: float
    """Megabytes of the version whose delivery is timed; less if the device has too little memory."""
    rounds: int
    """Number of measured repetitions of tickets, updates and deliveries."""
    run_steps: int
    """Training steps of a whole run."""


FULL = Sizes(
    layers=6,
    heads=24,
    resolution=512,
    num_inference_steps=10,
    group_size=8,
    lora_rank=64,
    adapter_megabytes=1700.0,
    rounds=3,
    run_steps=8,
)
"""Six of Qwen-Image's own layers (24 heads of 128 channels) instead of sixty, about 2 B parameters. The delivered LoRA
has the size of one of rank 64 on all sixty layers."""
SMALL = Sizes(
    layers=2,
    heads=2,
    resolution=32,
    num_inference_steps=4,
    group_size=4,
    lora_rank=8,
    adapter_megabytes=8.0,
    rounds=1,
    run_steps=2,
)
"""Sizes of `--quick`: everything runs, but no figure is large enough to be judged."""


@dataclass(frozen=True)
class Setting:
    """The machine as the doctor found it, and the folders that checks may write to."""

    devices: int
    device_name: str
    quick: bool
    work: str
    """Scratch folder; it is deleted at the end."""
    logs: str
    """Folder for the logs of the checks."""

    @property
    def pretended(self) -> bool:
        """True if the device is a CPU acting as a GPU; then no figure is meaningful."""
        return PRETENDED in self.device_name.lower()

    @property
    def small(self) -> bool:
        """True if the sizes are SMALL: with `--quick`, and always on a pretended device."""
        return self.quick or self.pretended

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.small else FULL

    def folder(self, name: str) -> Path:
        """Returns a scratch folder of this name and creates it if needed."""
        path = Path(self.work) / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self) -> dict[str, str]:
        """Returns the environment of the checks' processes: models are built in the scratch folder, without the Hub."""
        return {
            **os.environ,
            "ASYNC_FLOWRL_CACHE": str(self.folder("models")),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Setting":
        return cls(**json.loads(path.read_text(encoding="utf-8")))
