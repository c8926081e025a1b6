"""metrics.jsonl: the metrics of a run, one JSON object per training step; docs/metrics.md lists the keys."""

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_flowrl.config.paths import replace_file
from async_flowrl.observability.events import cut_unfinished_line, forget_steps, read_events

Metrics = dict[str, Any]


class MetricsLog:
    """The file of metrics at `path`. Existing lines stay, without an unfinished last one. `append` does not sync."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        cut_unfinished_line(path)
        path.touch()

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends the line of a step. Numbers that are not finite become null, since JSON cannot express them."""
        line: Metrics = {"step": step, **{name: _finite(value) for name, value in metrics.items() if name != "step"}}
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def truncate(self, step: int) -> None:
        with self._lock:
            forget_steps(self.path, step)

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Adds keys to the existing line of `step`, e.g. the means of an evaluation that finished after its step."""
        # Does nothing if there is no such line. The line is looked for from the end; lines before it are not parsed.
        added = {name: _finite(value) for name, value in more.items()}
        with self._lock:
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            for number in reversed(range(len(lines))):
                line: Metrics = json.loads(lines[number])
                if line["step"] == step:
                    lines[number] = json.dumps(line | added) + "\n"
                    replace_file(self.path, "".join(lines))
                if line["step"] <= step:
                    return

    def read(self) -> list[Metrics]:
        return list(read_events(self.path))


def _finite(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def version_of(lines: Sequence[Metrics]) -> int:
    """Returns the version that the last step made, also of a run that began at another's checkpoint."""
    return int(lines[-1]["step"]) + 1 if lines else 0


def missing_terms(line: Mapping[str, Any]) -> Counter[str]:
    """Optional term → number of groups that a step trained without its score, from the step's metrics."""
    missing = {re.fullmatch("reward/([^/]+)/missing", key): value for key, value in line.items()}
    return Counter({match[1]: int(value) for match, value in missing.items() if match and value})


def by_age(line: Mapping[str, Any], kind: str) -> Counter[int]:
    """Age of images in versions → value of `<kind>/<age>` in a step's metrics, e.g. of the kind `kept_of`."""
    ages = {key.removeprefix(f"{kind}/"): value for key, value in line.items() if key.startswith(f"{kind}/")}
    return Counter({int(age): value for age, value in ages.items() if value})
