"""The files of one run directory, read for a report; the run may still go on, so files may be missing or unfinished."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.config.messages import parsed
from async_flowrl.config.placement import PLACEMENTS
from async_flowrl.observability.evaluations import TRAINED, Evaluation, policy_versions, read_evaluations
from async_flowrl.observability.events import Event, effective, read_events, step_window
from async_flowrl.observability.intervals import Interval
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.result import REWARD
from async_flowrl.observability.run_directory import ATTEMPT, is_held
from async_flowrl.observability.timeline import Track, by_device, tracks

TICKET, VERSION = '"event": "ticket"', '"event": "version"'
"""What lines of events of these kinds contain. They are the largest part of the file, and reports skip them; only with
`placement=shared` they need tickets, which say for how long a reward was made."""
NO_REWARD = tuple(f'"state": "{state}"' for state in ("RUNNING", "HANDED", "TRAINED", "SKIPPED"))
"""What lines of a ticket's other changes contain, which do not say it; states of workers and versions are lower case.
"""
LOG_TAIL_BYTES = 200_000
"""Bytes at the end of the controller's log that are searched for the cause of a failure."""
MAX_CAUSE_CHARACTERS = 400
"""Largest number of characters of the cause that are shown."""
CAUSE = re.compile(r"^[\s|+-]*((?:[A-Za-z_]\w*\.)*[A-Z]\w*): (.+)$")
"""The last line of a traceback: type and message of an exception; in exception groups it is indented with bars."""


@dataclass(frozen=True)
class Records:
    """The content of a run directory so far."""

    root: Path
    """The run directory."""
    metrics: Sequence[Metrics]
    """One entry per step."""
    history: Sequence[Event]
    """Events that rollbacks did not make void (see events.effective), without those that reports skip (see TICKET)."""
    evaluations: Sequence[Evaluation]
    """The baseline's first, then policy versions in rising order; without terms that are always equal to the reward."""
    summary: dict[str, Any]
    """Content of summary.json; {} if it does not exist or is of an earlier attempt."""
    config: dict[str, Any]
    """Content of config.yaml; {} if it does not exist."""
    state: str
    """One of "running", "finished", "stopped" (before its end, with a summary), "failed" (an error is in the log) and
    "unfinished" (no error in the log, e.g. the process was killed)."""

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
        return policy_versions(self.evaluations)

    @cached_property
    def workers(self) -> list[Track]:
        return tracks(self.history)

    @property
    def shared(self) -> bool:
        """True if the run's processes sample and train (`placement=shared`)."""
        return PLACEMENTS[self.setting("placement")].together

    @cached_property
    def tracks(self) -> list[Track]:
        """The workers' tracks; of a process that samples and trains, what one part does is no wait of the other."""
        return by_device(self.workers) if self.shared else self.workers

    @cached_property
    def window(self) -> Interval:
        """(start of the first step, end of the last one), unix seconds."""
        return step_window(self.history)

    @cached_property
    def step_events(self) -> list[Event]:
        return sorted((e for e in self.history if e["event"] == "step"), key=lambda e: int(e["step"]))

    def setting(self, key: str, default: Any = None) -> Any:
        """The value of a setting by its dotted key, e.g. "reward.terms"; `default` if it is missing."""
        value: Any = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value

    @cached_property
    def failure(self) -> str | None:
        """One line with the cause of the last attempt's failure, from the controller's log; None if there is none."""
        _, error, told = _log(self.root).rpartition(" ERROR ")
        causes = [match for line in told.splitlines() if (match := CAUSE.match(line))]
        return f"{causes[-1][1]}: {causes[-1][2]}"[:MAX_CAUSE_CHARACTERS] if error and causes else None


def read_run(root: Path) -> Records:
    """Reads a run directory.

    Raises FileNotFoundError for a folder without metrics.jsonl, ValueError with file and line for a line that is not
    JSON.
    """
    if not (root / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{root} is no run directory: it has no metrics.jsonl")
    metrics: list[Metrics] = list(read_events(root / "metrics.jsonl"))
    evaluations = _distinct(read_evaluations(root / "evaluations.jsonl"))
    config = _config(root / "config.yaml")
    summary = _summary(root / "summary.json", len(metrics), config.get("total_steps"))
    skipped = (VERSION, *NO_REWARD) if PLACEMENTS[config.get("placement")].together else (TICKET, VERSION)
    events = root / "events.jsonl"
    return Records(
        root=root,
        metrics=metrics,
        history=effective(read_events(events, skipped=skipped)) if events.exists() else [],
        evaluations=sorted(evaluations, key=lambda e: (not e.baseline, e.version)),
        summary=summary,
        config=config,
        state=_state(root, summary, len(metrics)),
    )


def _distinct(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The evaluations without trained terms that always equal the reward, as a single term of weight 1 does."""
    curves = [item for each in evaluations for item in each.curves.items()]
    names = {name for name, curve in curves if name != REWARD and curve.kind == TRAINED}
    equal = {name for name in names if all(_scores(each, name) == _scores(each, REWARD) for each in evaluations)}
    return [
        replace(each, curves={name: curve for name, curve in each.curves.items() if name not in equal})
        for each in evaluations
    ]


def _scores(evaluation: Evaluation, name: str) -> Mapping[int, Sequence[float]] | None:
    return evaluation.curves[name].scores if name in evaluation.curves else None


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def _summary(path: Path, steps: int, total_steps: int | None) -> dict[str, Any]:
    """The summary, or {} if it is of an earlier attempt: its numbers of steps differ from those of the run now."""
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
    """The end of the controller's log, from the beginning of its last attempt; at most LOG_TAIL_BYTES bytes."""
    log = root / "logs" / "controller.log"
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").rpartition(ATTEMPT)[2]
