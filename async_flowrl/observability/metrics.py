"""metrics.jsonl: one JSON object per training step."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import cut_unfinished_line, read_events

Metrics = dict[str, Any]


class MetricsLog:
    """Appends to `path`; a line is on disk when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        cut_unfinished_line(path)
        path.touch()

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers that are not finite become null: JSON has no name for them."""
        line: Metrics = {"step": step, **{name: _finite(value) for name, value in metrics.items() if name != "step"}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def truncate(self, step: int) -> None:
        """Cuts back to the steps before `step`, for a run that goes on from its checkpoint."""
        kept = [line for line in self.read() if line["step"] < step]
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def read(self) -> list[Metrics]:
        return list(read_events(self.path))


def _finite(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
