"""Run directory: the paths of a run's files (docs/run_directory.md), and its lock against a second controller."""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.config.check import ConfigError
from async_flowrl.config.paths import replace_file
from async_flowrl.config.schema import FULL, LORA, Config

# Entries that a run writes before it starts to train.
LEFT_BY_A_START = {".hydra", ".lock", "config.yaml", "logs"}

# Line of the controller's log at which an attempt begins (a resumed run has several attempts).
ATTEMPT = "an attempt begins"

# Attempts to take the lock, and seconds between them: `is_held` in another process holds it very briefly.
LOCK_ATTEMPTS, LOCK_PAUSE = 4, 0.05
IN_USE = "output_dir={} is in use by another running controller"


def is_held(lock: Path) -> bool:
    """True if a running controller holds this lock file; False if it does not exist."""
    try:
        file = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


class RunDirectory:
    """Paths below `root` (output_dir), and the lock. The constructor creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.hydra = root / ".hydra"
        self.metrics = root / "metrics.jsonl"
        self.events = root / "events.jsonl"
        self.evaluations = root / "evaluations.jsonl"
        self.scores = root / "scores.jsonl"
        self.timeline = root / "timeline.json"
        self.images = root / "images"
        self.checkpoints = root / "checkpoints"
        self.report = root / "report.html"
        self.logs = root / "logs"
        self.summary = root / "summary.json"
        self._lock = -1

    def trained(self, tune: str) -> Path:
        return self.root / {LORA: "lora", FULL: "transformer"}[tune]

    def best(self, tune: str) -> Path:
        trained = self.trained(tune)
        return trained.with_name(f"{trained.name}_best")

    def used(self) -> bool:
        """True if a run began to train here. Files of a run that could not start (LEFT_BY_A_START) do not count."""
        entries = self.root.iterdir() if self.root.is_dir() else iter(())
        return any(
            entry.name not in LEFT_BY_A_START and not (entry.is_dir() and not any(entry.iterdir())) for entry in entries
        )

    def claim(self) -> None:
        folder = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        try:
            with TemporaryDirectory(dir=folder):  # os.access says yes to root, whatever the file system says
                pass
        except OSError as error:
            raise ConfigError(f"output_dir={self.root} cannot be written: {folder}: {error.strerror}") from error
        if is_held(self.root / ".lock"):
            raise ConfigError(IN_USE.format(self.root))

    def create(self, config: Config, hydra_record: Mapping[str, str]) -> None:
        """Makes the folders, takes the lock (until `release`) and writes the resolved configuration.

        `hydra_record` maps the names of files in `.hydra/` to their texts. Raises ConfigError if the directory cannot
        be written or another controller runs in it.
        """
        try:
            for folder in (self.root, self.images, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            self.config.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))), encoding="utf-8")
            for name, text in hydra_record.items():
                self.hydra.mkdir(exist_ok=True)
                (self.hydra / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"output_dir={self.root} cannot be written: {error.strerror}") from error

    def _take_lock(self) -> None:
        lock = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR)
        for left in reversed(range(LOCK_ATTEMPTS)):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if left == 0:
                    os.close(lock)
                    raise ConfigError(IN_USE.format(self.root)) from None
                time.sleep(LOCK_PAUSE)
        self._lock = lock

    def release(self) -> None:
        os.close(self._lock)

    def write_summary(self, summary: dict[str, Any]) -> None:
        replace_file(self.summary, json.dumps(summary, indent=2) + "\n")
