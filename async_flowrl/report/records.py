"""The files of one run directory, read for a report; the run may still go on, so files may be missing or unfinished."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.config.curves import REWARD
from async_flowrl.config.error_text import parsed
from async_flowrl.config.placement import recorded_placement
from async_flowrl.observability.evaluations import TRAINED, Evaluation, policy_versions, read_evaluations
from async_flowrl.observability.events import Event, effective, read_events, step_window, steps_of
from async_flowrl.observability.intervals import Interval
from async_flowrl.observability.metrics import Metrics, version_of
from async_flowrl.observability.run_directory import ATTEMPT, is_held
from async_flowrl.observability.timeline import Track, by_device, tracks

# What lines of events of these kinds contain. They are the largest part of the file, and reports skip them.
SKIPPED = ('"event": "ticket"', '"event": "version"')
# Bytes at the end of the controller's log that are searched for the cause of a failure.
LOG_TAIL_BYTES = 200_000
MAX_CAUSE_CHARACTERS = 400
# The last line of a traceback: type and message of an exception; in exception groups it is indented with bars.
CAUSE = re.compile(r"^[\s|+-]*((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)$")


@dataclass(frozen=True)
class Records:
    """The content of a run directory so far.

    `history` has the events that rollbacks did not make void, without those that reports skip (SKIPPED).
    `evaluations` has the baseline first, without terms that always equal the reward. `summary` and `config` are {} if
    the file does not exist, or the summary is of an earlier attempt. `state` is "running", "finished", "stopped"
    (before its end, with a summary), "failed" (an error is in the log) or "unfinished" (e.g. the process was killed).
    """

    root: Path
    metrics: Sequence[Metrics]
    history: Sequence[Event]
    evaluations: Sequence[Evaluation]
    summary: dict[str, Any]
    config: dict[str, Any]
    state: str

    @property
    def steps(self) -> int:
        return version_of(self.metrics)

    @property
    def total_steps(self) -> int | None:
        total = self.summary.get("total_steps") or self.config.get("total_steps")
        return int(total) if total else None

    @property
    def policy(self) -> list[Evaluation]:
        return policy_versions(self.evaluations)

    @cached_property
    def workers(self) -> list[Track]:
        return tracks(self.history)

    @property
    def shared(self) -> bool:
        return recorded_placement(self.setting("placement")).together

    @cached_property
    def tracks(self) -> list[Track]:
        """The workers' tracks; of a process that samples and trains, what one part does is no wait of the other."""
        return by_device(self.workers) if self.shared else self.workers

    @cached_property
    def window(self) -> Interval:
        return step_window(self.history)

    @cached_property
    def step_events(self) -> list[Event]:
        return steps_of(self.history)

    def setting(self, key: str, default: Any = None) -> Any:
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def failure(self) -> str | None:
        _, error, text = _log(self.root).rpartition(" ERROR ")
        causes = [match for line in text.splitlines() if (match := CAUSE.match(line))]
        return f"{causes[-1][1]}: {causes[-1][2]}"[:MAX_CAUSE_CHARACTERS] if error and causes else None


def read_run(root: Path) -> Records:
    """Raises FileNotFoundError without metrics.jsonl, ValueError for a line that is not JSON."""
    if not (root / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{root} is no run directory: it has no metrics.jsonl")
    metrics: list[Metrics] = list(read_events(root / "metrics.jsonl"))
    evaluations = _distinct(read_evaluations(root / "evaluations.jsonl"))
    file = root / "config.yaml"
    config: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False) if file.exists() else {}
    config = config if isinstance(config, dict) else {}
    summary = _summary(root / "summary.json", version_of(metrics), config.get("total_steps"))
    events = root / "events.jsonl"
    return Records(
        root=root,
        metrics=metrics,
        history=effective(read_events(events, skipped=SKIPPED)) if events.exists() else [],
        evaluations=sorted(evaluations, key=lambda e: (not e.baseline, e.version)),
        summary=summary,
        config=config,
        state=_state(root, summary, version_of(metrics)),
    )


def _distinct(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    curves = [item for e in evaluations for item in e.curves.items()]
    names = {name for name, curve in curves if name != REWARD and curve.kind == TRAINED}
    equal = {name for name in names if all(_scores(e, name) == _scores(e, REWARD) for e in evaluations)}
    return [replace(e, curves={k: curve for k, curve in e.curves.items() if k not in equal}) for e in evaluations]


def _scores(evaluation: Evaluation, name: str) -> Mapping[int, Sequence[float]] | None:
    return evaluation.curves[name].scores if name in evaluation.curves else None


def _summary(path: Path, steps: int, total_steps: int | None) -> dict[str, Any]:
    if not path.exists():
        return {}
    summary = dict(parsed(path.read_text(encoding="utf-8"), str(path)))
    same = total_steps is None or summary.get("total_steps", total_steps) == total_steps
    return summary if same and summary.get("steps", steps) == steps else {}


def _state(root: Path, summary: dict[str, Any], steps: int) -> str:
    if summary:
        return "finished" if steps >= int(summary.get("total_steps", steps)) else "stopped"
    if is_held(root / ".lock"):
        return "running"
    return "failed" if " ERROR " in _log(root) else "unfinished"


def _log(root: Path) -> str:
    # The end of the controller's log, from the beginning of its last attempt; at most LOG_TAIL_BYTES bytes.
    log = root / "logs" / "controller.log"
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").rpartition(ATTEMPT)[2]
