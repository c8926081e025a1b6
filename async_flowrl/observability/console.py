"""Console output of a run during training: a progress bar, one plain line per step, or nothing (setting `console`)."""

import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.observability.monitor import View
from async_flowrl.observability.terminal import say

# Values of the environment variable TERM for terminals that cannot move the cursor.
DUMB = ("", "dumb", "unknown")
# Steps over which seconds per step and the time left are measured.
AVERAGED_STEPS = 20


class Display(View):
    """A console view, which shows nothing. The run calls `phase` and `begin` itself, and the rest through a Monitor."""

    def phase(self, what: str) -> None:
        """Shows what the run is doing before the first step, e.g. "loading the models"."""

    def begin(self) -> None:
        """The first step begins."""


class Counting(Display):
    """Base of the views that show steps: counts them and measures their speed."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done, self._clock = total, 0, clock
        self._line: Mapping[str, Any] = {}
        self._ends: deque[float] = deque([clock()], maxlen=AVERAGED_STEPS + 1)

    def begin(self) -> None:
        if not self._line:
            self._ends[0] = self._clock()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.done, self._line = step + 1, metrics
        self._ends.append(self._clock())

    @property
    def step_seconds(self) -> float:
        return (self._ends[-1] - self._ends[0]) / max(1, len(self._ends) - 1)

    @property
    def left(self) -> str:
        return f"ETA {timedelta(seconds=round(self.step_seconds * (self.total - self.done)))}"

    @property
    def numbers(self) -> str:
        reward, staleness = number(self._line.get("reward/mean")), number(self._line.get("staleness/mean"), ".2g")
        return f"reward {reward} | staleness {staleness} | {self.step_seconds:.2f} s/step"


class Lines(Counting):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        say(f"step {self.done}/{self.total} | {self.numbers} | {self.left}\n")

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        say(evaluation_line(version, metrics) + "\n")


class Bar(Counting):
    """View of two rows below all other output: steps and time left; reward, staleness, speed and the last warning.

    The cursor stays visible, so that the terminal remains usable after the process is killed.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic, console: Console | None = None) -> None:
        super().__init__(total, clock)
        self._rows = Rows(console or Console())
        self._task = self._rows.add_task("", total=total, left="starting")
        self._warnings = Warnings(self._rows)
        self._redirected = [
            handler
            for handler in logging.getLogger().handlers
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr
        ]
        self._rows.start()
        self._rows.console.show_cursor(True)
        for handler in self._redirected:  # they write above the rows, through the stderr that rich has put in place
            handler.setStream(sys.stderr)
        logging.getLogger().addHandler(self._warnings)

    def phase(self, what: str) -> None:
        self._rows.update(self._task, left=what)

    def begin(self) -> None:
        super().begin()
        self.phase("the first step is under way")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().log(step, metrics)
        self._rows.numbers = self.numbers
        self._rows.update(self._task, completed=self.done, left=self.left)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        self._rows.console.print(evaluation_line(version, metrics), highlight=False, markup=False)

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
        redirect = sys.stderr.isatty()
        super().__init__(*columns, console=console, redirect_stderr=redirect, refresh_per_second=2, expand=True)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        text = " | ".join(filter(None, (self.numbers, self.warning)))
        yield Text(text, no_wrap=True, overflow="ellipsis")


class Warnings(logging.Handler):
    def __init__(self, rows: Rows) -> None:
        super().__init__(logging.WARNING)
        self._rows = rows

    def emit(self, record: logging.LogRecord) -> None:
        self._rows.warning = f"last warning: {' '.join(record.getMessage().split())}"


def console_of(setting: str) -> str:
    """Resolves `console` to `bar`, `lines` or `quiet`. Raises ConfigError for a bar that stdout cannot show."""
    drawable = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in DUMB
    if setting == "bar" and not drawable:
        raise ConfigError("console=bar needs a terminal as stdout that can move its cursor (TERM): use auto or lines")
    if setting == "auto":
        return "bar" if drawable else "lines"
    return setting


def open_display(config: Config) -> Display:
    kinds: dict[str, type[Counting]] = {"lines": Lines, "bar": Bar}
    console = console_of(config.console)
    return Display() if console == "quiet" else kinds[console](config.total_steps)


def number(value: Any, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_change(metrics: Mapping[str, float], name: str) -> str:
    """The mean of a curve and its change since the first evaluation, e.g. "0.4312 (+0.12 ± 0.03)"."""
    changed, high = metrics.get(f"{name}/change"), metrics.get(f"{name}/change_high")
    text = number(metrics.get(f"{name}/mean"))
    if changed is None:
        return text
    return f"{text} ({changed:+.3g}{'' if high is None else f' ± {high - changed:.2g}'})"


def evaluation_line(version: int, metrics: Mapping[str, float]) -> str:
    title = "the baseline" if any(name.startswith("baseline/") for name in metrics) else f"version {version}"
    metrics = {name.removeprefix("baseline/"): value for name, value in metrics.items()}
    names = [name.removesuffix("/mean") for name in metrics if re.fullmatch("(reward|held_out/[^/]+)/mean", name)]
    return f"evaluation of {title}: " + ", ".join(f"{name} {with_change(metrics, name)}" for name in names)
