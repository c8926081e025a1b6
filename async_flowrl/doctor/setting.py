"""Setting of the doctor's checks: the machine, the folders, and how large the work may be."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

PRETENDED = "pretended"
"""In a device's name: CPU kernels behind a device that says it is a GPU, for rehearsals of this program."""


@dataclass(frozen=True)
class Sizes:
    """Of the random model and of the work on it; `width` is 128 channels times the heads."""

    layers: int
    heads: int
    resolution: int
    """Pixels along each side of an image."""
    num_inference_steps: int
    group_size: int
    lora_rank: int
    adapter_megabytes: float
    """Of the version whose delivery is timed; scaled down where a device has too little memory for it."""
    rounds: int
    """Measured repetitions of a ticket, an update or a delivery."""
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
"""Qwen-Image's own layer (24 heads of 128 channels) six times instead of sixty, about 2 B parameters; its adapter of
rank 64 at full length is what is delivered."""
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
"""Everything runs, nothing is large enough to be judged."""


@dataclass(frozen=True)
class Setting:
    """The machine as the driver found it, and where checks may write."""

    devices: int
    device_name: str
    quick: bool
    work: str
    """Scratch folder; it is deleted at the end."""
    logs: str
    """Folder of what the checks say while they run."""

    @property
    def pretended(self) -> bool:
        """Whether the device only pretends to be a GPU, so that no figure means anything."""
        return PRETENDED in self.device_name.lower()

    @property
    def small(self) -> bool:
        """Whether sizes are those of `--quick`; a pretended device is a CPU and gets no other."""
        return self.quick or self.pretended

    @property
    def sizes(self) -> Sizes:
        return SMALL if self.small else FULL

    def folder(self, name: str) -> Path:
        """A scratch folder of this name."""
        path = Path(self.work) / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self) -> dict[str, str]:
        """Of every process of the checks: models are built below the scratch folder, and nothing asks the hub."""
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
