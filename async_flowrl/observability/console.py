"""The console of a run: a live panel on a terminal, one plain line per step elsewhere, or nothing (`console`)."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.progress import Progress, duration, evaluated, evaluation_line, number
from async_flowrl.observability.terminal import say
from async_flowrl.observability.trackers import Sample

DUMB = ("", "dumb", "unknown")
"""Values of TERM of what cannot move its cursor."""


class Display(Protocol):
    """A view of a run on the console, from its start to its end."""

    def phase(self, what: str) -> None:
        """What the run does before it trains."""
        ...

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None:
        """What the pools do from now on; `peak` is the FLOP/s of a worker's device, where it is known."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None:
        """Again does nothing."""
        ...


class Silent:
    """Nothing is shown."""

    def phase(self, what: str) -> None: ...

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """One plain line per step and per evaluation."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None:
        self._progress.begin()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._progress.step(step, metrics)
        self._say(step_line(self._progress))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        whose, metrics = evaluated(metrics)
        self._say(f"evaluation of {whose or f'version {version}'}: {evaluation_line(metrics)}")

    def _say(self, line: str) -> None:
        say(line + "\n")


def step_line(progress: Progress) -> str:
    """Of the newest step."""
    line = progress.line
    parts = [
        f"step {progress.done}/{progress.total}",
        f"reward {number(line.get('reward/mean'))}",
        *progress.losses,
        f"staleness {number(line.get('staleness/mean'), '.2g')}",
        f"{progress.step_seconds or 0.0:.2f} s/step",
        f"ETA {duration(progress.seconds_left or 0.0)}",
    ]
    return " | ".join(parts)


def console_of(wanted: str) -> str:
    """`panel`, `lines` or `quiet`. Raises ConfigError for a panel where it cannot be drawn."""
    lacking = lacking_for_panel()
    if wanted == "panel" and lacking is not None:
        raise ConfigError(f"console=panel needs a terminal that it can draw on, but {lacking}: use auto or lines")
    if wanted == "auto":
        return "panel" if lacking is None else "lines"
    return wanted


def show_what_can_be_shown() -> None:
    """From now on stdout and stderr replace characters that they cannot encode, where they would have raised."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def lacking_for_panel() -> str | None:
    """Why there can be no panel; None where there can."""
    if not sys.stdout.isatty():
        return "stdout is none"
    if (term := os.environ.get("TERM", "").lower()) in DUMB:
        return f"TERM={term or '(not set)'} cannot move its cursor"
    return None


def open_display(config: Config, *, held_out: bool) -> Display:
    """The view that `console` asks for, of a run that is starting. `held_out`: whether evaluations look at prompts that
    are not trained. Raises ConfigError."""
    kind = console_of(config.console)
    if kind == "quiet":
        return Silent()
    progress = Progress(config.total_steps)
    if kind == "lines":
        return Lines(progress)
    from async_flowrl.observability.panel import Panel
    from async_flowrl.observability.panel_rows import Now

    title = " · ".join(dict.fromkeys((config.name, config.mode_name)))
    return Panel(progress, Now(title, held_out=held_out, bound=config.max_staleness))
