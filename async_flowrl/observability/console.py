"""Console output of a run during training: a progress bar, one plain line per step, or nothing (setting `console`)."""

import io
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.observability.progress import Progress, duration, evaluated, evaluation_line, number
from async_flowrl.observability.terminal import say
from async_flowrl.observability.trackers import Sample

DUMB = ("", "dumb", "unknown")
"""Values of the environment variable TERM for terminals that cannot move the cursor."""


class Display(Protocol):
    """Interface of a console view. The run calls `phase` and `begin` itself, and the rest through a Monitor."""

    def phase(self, what: str) -> None:
        """Shows what the run is doing before the first step, e.g. "loading the models"."""
        ...

    def begin(self) -> None:
        """Called when training begins."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None:
        """Ends the view; may be called more than once."""
        ...


class Silent:
    """View that shows nothing."""

    def phase(self, what: str) -> None: ...

    def begin(self) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None: ...

    def image(self, path: Path, version: int) -> None: ...

    def samples(self, version: int, samples: Sequence[Sample]) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """View that prints one plain line per step and per evaluation."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def begin(self) -> None:
        self._progress.begin()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._progress.step(step, metrics)
        self._say(step_line(self._progress))

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        whose, metrics = evaluated(metrics)
        self._say(f"evaluation of {whose or f'version {version}'}: {evaluation_line(metrics)}")

    def _say(self, line: str) -> None:
        say(line + "\n")


class Bar(Silent):
    """View of two rows below all other output: steps and time left; reward, staleness, speed and the last warning.

    The cursor stays visible, so that the terminal remains usable after the process is killed.
    """

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._rows = Rows(console or Console())
        self._task = self._rows.add_task("", total=progress.total, left="starting")
        self._warnings = Warnings(self._rows)
        self._redirected: list[logging.StreamHandler[Any]] = []
        own_handlers = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
        ]
        self._rows.start()
        self._rows.console.show_cursor(True)
        for handler in own_handlers:  # they write above the rows, through the stderr that rich has put in place
            handler.setStream(sys.stderr)
            self._redirected.append(handler)
        logging.getLogger().addHandler(self._warnings)

    def phase(self, what: str) -> None:
        self._rows.update(self._task, left=what)

    def begin(self) -> None:
        self._progress.begin()
        self.phase("the first step is under way")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        progress = self._progress
        progress.step(step, metrics)
        self._rows.numbers = " | ".join(numbers(progress))
        self._rows.update(self._task, completed=progress.done, left=f"ETA {duration(progress.seconds_left or 0.0)}")

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        whose, metrics = evaluated(metrics)
        line = f"evaluation of {whose or f'version {version}'}: {evaluation_line(metrics)}"
        self._rows.console.print(line, highlight=False, markup=False)

    def close(self) -> None:
        logging.getLogger().removeHandler(self._warnings)
        self._rows.stop()
        while self._redirected:
            self._redirected.pop().setStream(sys.stderr)


class Rows(RichProgress):
    """The two rows; always two, so that whatever is written above them cannot leave a stray one behind."""

    def __init__(self, console: Console) -> None:
        self.numbers = self.warning = ""
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[left]}"))
        own_stderr = sys.stderr.isatty()
        super().__init__(*columns, console=console, redirect_stderr=own_stderr, refresh_per_second=2, expand=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        said = " | ".join(filter(None, (self.numbers, self.warning)))
        yield Text(said, no_wrap=True, overflow="ellipsis")


class Warnings(logging.Handler):
    """Log handler that shows the newest warning in the rows; the terminal above them has all."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(logging.WARNING)
        self._rows = rows

    def emit(self, record: logging.LogRecord) -> None:
        self._rows.warning = f"last warning: {' '.join(record.getMessage().split())}"


def step_line(progress: Progress) -> str:
    """The line of the newest step: reward, skipped tickets, staleness, seconds per step and time left."""
    left = f"ETA {duration(progress.seconds_left or 0.0)}"
    return " | ".join((f"step {progress.done}/{progress.total}", *numbers(progress), left))


def numbers(progress: Progress) -> list[str]:
    """Texts about the newest step: reward, skipped tickets, staleness and seconds per step."""
    return [
        f"reward {number(progress.line.get('reward/mean'))}",
        *progress.losses,
        f"staleness {number(progress.line.get('staleness/mean'), '.2g')}",
        f"{progress.step_seconds or 0.0:.2f} s/step",
    ]


def console_of(wanted: str) -> str:
    """Resolves the setting `console` to `bar`, `lines` or `quiet`; `auto` is a bar if one can be drawn, else lines.

    Raises ConfigError if a bar is asked for and stdout cannot show one.
    """
    lacking = lacking_for_bar()
    if wanted == "bar" and lacking is not None:
        raise ConfigError(f"console=bar needs a terminal that it can draw on, but {lacking}: use auto or lines")
    if wanted == "auto":
        return "bar" if lacking is None else "lines"
    return wanted


def show_what_can_be_shown() -> None:
    """Makes stdout and stderr replace characters that their encoding lacks, instead of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def lacking_for_bar() -> str | None:
    """The reason why stdout cannot show a progress bar; None if it can."""
    if not sys.stdout.isatty():
        return "stdout is none"
    if (term := os.environ.get("TERM", "").lower()) in DUMB:
        return f"TERM={term or '(not set)'} cannot move its cursor"
    return None


def open_display(config: Config) -> Display:
    """Opens the view that the setting `console` asks for; called once when a run starts.

    Raises ConfigError as `console_of` does.
    """
    kind = console_of(config.console)
    if kind == "quiet":
        return Silent()
    progress = Progress(config.total_steps)
    return Lines(progress) if kind == "lines" else Bar(progress)
