"""The files of one run directory, read for a report; each may be missing or unfinished."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.observability.bottleneck import step_window
from async_flowrl.observability.evaluations import Evaluation, read_evaluations
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.intervals import Interval
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.run_directory import ATTEMPT, is_held
from async_flowrl.observability.timeline import Track, tracks

NOT_READ = ('"event": "ticket"', '"event": "version"')
"""Events that a report says nothing of; they are the most of the file."""
LOG_TAIL = 200_000
"""Bytes of the controller's log that are searched for the cause of a failure."""
MAX_CAUSE = 400
"""Characters of it that are shown."""
CAUSE = re.compile(r"^[\s|+-]*((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)$")
"""The last line of a traceback: a type of error and its message; groups of errors stand behind bars."""


@dataclass(frozen=True)
class Records:
    """What a run has written so far."""

    root: Path
    metrics: Sequence[Metrics]
    history: Sequence[Event]
    """What counts: without what a return to a checkpoint undid, and without tickets and versions."""
    evaluations: Sequence[Evaluation]
    """Of policy versions by version, the baseline's first."""
    summary: dict[str, Any]
    """Empty where there is none, or only that of an earlier attempt."""
    config: dict[str, Any]
    state: str
    """running, finished, stopped (before its end, in order), failed, or unfinished (it ended without a word)."""

    @property
    def steps(self) -> int:
        return len(self.metrics)

    @property
    def total_steps(self) -> int | None:
        total = self.summary.get("total_steps") or self.config.get("total_steps")
        return int(total) if total else None

    @property
    def policy(self) -> list[Evaluation]:
        """Evaluations of policy versions, oldest first."""
        return [e for e in self.evaluations if not e.baseline]

    @cached_property
    def workers(self) -> list[Track]:
        return tracks(self.history)

    @cached_property
    def window(self) -> Interval:
        """From the start of the first step to the end of the last one."""
        return step_window(self.history)

    @cached_property
    def step_events(self) -> list[Event]:
        return sorted((e for e in self.history if e["event"] == "step"), key=lambda e: int(e["step"]))

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def failure(self) -> str | None:
        """The cause of the last attempt's failure that the controller's log names, in one line."""
        _, error, told = _log(self.root).rpartition(" ERROR ")
        causes = [match for line in told.splitlines() if (match := CAUSE.match(line))]
        return f"{causes[-1][1]}: {causes[-1][2]}"[:MAX_CAUSE] if error and causes else None


def read_run(root: Path) -> Records:
    """Raises FileNotFoundError for a folder that is no run's, ValueError naming a broken line of a file."""
    if not (root / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{root} is no run directory: it has no metrics.jsonl")
    metrics: list[Metrics] = list(read_events(root / "metrics.jsonl"))
    evaluations = sorted(read_evaluations(root / "evaluations.jsonl"), key=lambda e: (not e.baseline, e.version))
    config = _config(root / "config.yaml")
    summary = _summary(root / "summary.json", len(metrics), config.get("total_steps"))
    return Records(
        root=root,
        metrics=metrics,
        history=effective(_events(root / "events.jsonl")),
        evaluations=evaluations,
        summary=summary,
        config=config,
        state=_state(root, summary, len(metrics)),
    )


def _events(path: Path) -> Iterator[Event]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            if any(kind in line for kind in NOT_READ):
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _summary(path: Path, steps: int, total_steps: int | None) -> dict[str, Any]:
    """Of the newest attempt: a run that goes on, with more steps or to more of them, has not written its own yet."""
    if not path.exists():
        return {}
    summary = dict(json.loads(path.read_text(encoding="utf-8")))
    same = total_steps is None or summary.get("total_steps", total_steps) == total_steps
    return summary if same and summary.get("steps", steps) == steps else {}


def _state(root: Path, summary: dict[str, Any], steps: int) -> str:
    if summary:
        return "finished" if steps >= int(summary.get("total_steps", steps)) else "stopped"
    if is_held(root / ".lock"):
        return "running"
    return "failed" if " ERROR " in _log(root) else "unfinished"


def _log(root: Path) -> str:
    """The end of what the controller logged in its last attempt."""
    log = root / "logs" / "controller.log"
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        return file.read().decode(errors="replace").rpartition(ATTEMPT)[2]
