"""Console output of a run during training: a live panel, one plain line per step, or nothing (setting `console`)."""

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
"""Values of the environment variable TERM for terminals that cannot move the cursor."""


class Display(Protocol):
    """Interface of a console view. The run calls `phase` and `watch` itself, and the rest through a Monitor."""

    def phase(self, what: str) -> None:
        """Shows what the run is doing before the first step, e.g. "loading the models"."""
        ...

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None:
        """Called when training begins. `peak` is the peak FLOP/s of one worker's device, None if it is unknown."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def amend(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None:
        """Ends the view; may be called more than once."""
        ...


class Silent:
    """View that shows nothing."""

    def phase(self, what: str) -> None: ...

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def amend(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """View that prints one plain line per step and per evaluation."""

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
    """The line of the newest step: reward, skipped tickets, staleness, seconds per step and time left."""
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
    """Resolves the setting `console` to `panel`, `lines` or `quiet`; `auto` is a panel if one can be drawn, else lines.

    Raises ConfigError if a panel is asked for and stdout cannot show one.
    """
    lacking = lacking_for_panel()
    if wanted == "panel" and lacking is not None:
        raise ConfigError(f"console=panel needs a terminal that it can draw on, but {lacking}: use auto or lines")
    if wanted == "auto":
        return "panel" if lacking is None else "lines"
    return wanted


def show_what_can_be_shown() -> None:
    """Makes stdout and stderr replace characters that their encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def lacking_for_panel() -> str | None:
    """The reason why stdout cannot show a panel; None if it can."""
    if not sys.stdout.isatty():
        return "stdout is none"
    if (term := os.environ.get("TERM", "").lower()) in DUMB:
        return f"TERM={term or '(not set)'} cannot move its cursor"
    return None


def open_display(config: Config, *, held_out: bool) -> Display:
    """Opens the view that the setting `console` asks for; called once when a run starts.

    `held_out` is True if no evaluated prompt is also a training prompt. Raises ConfigError as `console_of` does.
    """
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
