"""The run directory: where everything a run leaves behind is, and the lock that keeps a second controller out."""

import fcntl
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.check import ConfigError
from async_flowrl.config import Config


class RunDirectory:
    """Paths of the contract in docs/run_directory.md."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.timeline = root / "timeline.json"
        self.images = root / "images"
        self.checkpoints = root / "checkpoints"
        self.lora = root / "lora"
        self.report = root / "report.html"
        self.logs = root / "logs"
        self.summary = root / "summary.json"
        self._lock = -1

    def create(self, config: Config) -> None:
        """Makes the folders, takes the lock and records the resolved configuration. Raises ConfigError if locked."""
        for folder in (self.root, self.images, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"output_dir={self.root} is in use by another running controller") from None
        self.config.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))

    def release(self) -> None:
        os.close(self._lock)

    def write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2, sort_keys=False)
        temporary = self.summary.with_suffix(".tmp")
        temporary.write_text(text + "\n")
        temporary.replace(self.summary)
