"""The live panel of a run on a terminal: redrawn by a timer below whatever else is written, never by the run itself."""

import atexit
import logging
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger, pool_of
from async_flowrl.observability.panel_rows import ASCII, Glyphs, Now, rows
from async_flowrl.observability.progress import Progress, evaluated, evaluation_line
from async_flowrl.observability.trackers import Sample

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
MAX_WARNINGS = 2
"""Warnings that the panel keeps in view; all of them stand above it."""
MIN_ROOM = 2
"""Rows of the terminal that the panel leaves to what is above it."""


class Panel:
    """Implements `Display` (console.py).

    What is written to stdout and, where it is the same terminal, stderr appears above the panel. The cursor is never
    hidden and the terminal's modes stay as they are, so that a process that is killed leaves nothing to restore.
    """

    def __init__(self, progress: Progress, now: Now, console: Console | None = None) -> None:
        self._progress, self._now = progress, now
        self._console = console or Console()
        self._glyphs = ASCII if self._console.options.ascii_only else Glyphs()
        self._warnings = Warnings(progress)
        self._pools: PoolLedger | None = None
        self._rates: Rates | None = None
        self._widths: tuple[int, tuple[int, ...]] = (self._console.width, ())
        self._failure: Exception | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._turn = threading.Lock()
        """Of the progress: a step that is entered while the timer's thread goes over it would make that raise."""
        self._closed = threading.Event()
        own_stderr = sys.stderr.isatty()
        self._live = Live(
            self, console=self._console, auto_refresh=False, redirect_stderr=own_stderr, vertical_overflow="crop"
        )
        self._start(own_stderr)
        self._timer = threading.Thread(target=self._tick, name="console", daemon=True)
        self._timer.start()

    def phase(self, what: str) -> None:
        self._now.phase = what

    def watch(self, pools: PoolLedger, events: EventLog, peak: float | None) -> None:
        self._pools, self._rates = pools, None if peak is None else Rates(events, peak)
        self._now.phase = "the first step is under way"
        self._progress.begin()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises what went wrong when the panel was drawn last."""
        if self._failure is not None:
            raise self._failure
        with self._turn:
            self._progress.step(step, metrics)

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        whose, metrics = evaluated(metrics)
        if whose is None:
            self._progress.evaluation = f"version {version}", metrics
        self._console.print(
            f"evaluation of {whose or f'version {version}'}: {evaluation_line(metrics)}", highlight=False, markup=False
        )

    def image(self, path: Path, version: int) -> None:
        """Pictures are in the run directory."""

    def samples(self, version: int, samples: Sequence[Sample]) -> None:
        """Likewise."""

    def close(self) -> None:
        """Draws the panel a last time and leaves it there."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._now.ended = True
        logging.getLogger().removeHandler(self._warnings)
        try:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            self._live.stop()
        except Exception as error:  # the terminal is gone, for example; the run is whole all the same
            logger.warning("the panel could not be drawn a last time: %s: %s", type(error).__name__, error)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._failure is not None:
            yield Text("", end="")
            return
        width = options.max_width
        with self._turn:
            drawn = rows(self._progress, self._now, width, max(1, options.size.height - MIN_ROOM), self._glyphs)
        self._widths = width, tuple(row.cell_len for row in drawn)
        yield Text("\n", end="", no_wrap=True).join(drawn)

    def _start(self, own_stderr: bool) -> None:
        """A cursor that is hidden, as Live does it, would stay so behind a killed process: it is shown again."""
        streams = {sys.stdout, *([sys.stderr] if own_stderr else [])}
        handlers = [handler for handler in stream_handlers() if handler.stream in streams]
        self._live.start()
        self._console.show_cursor(True)
        for handler in handlers:
            stream = handler.setStream(sys.stdout if handler.stream is sys.__stdout__ else sys.stderr)
            if stream is not None:
                self._redirected.append((handler, stream))
        logging.getLogger().addHandler(self._warnings)
        atexit.register(self.close)

    def _tick(self) -> None:
        while not self._closed.is_set():
            try:
                self._refresh()
            except Exception as error:  # said by the next `log`, which switches this view off
                self._failure = error
                return
            self._closed.wait(REFRESH_SECONDS)

    def _refresh(self) -> None:
        now = self._now
        if self._pools is not None:
            now.pools = self._pools.now()
        if self._rates is not None:
            now.mfu = self._rates.shares(self._progress)
        now.warnings = self._warnings.newest()
        self._clear_wrapped()
        if not self._closed.is_set():
            self._live.refresh()

    def _clear_wrapped(self) -> None:
        """On a terminal that has become narrower, what was drawn takes more rows than Live goes back over."""
        width, drawn = self._widths
        narrow = self._console.width
        if narrow < width:
            more = sum(max(0, -(-taken // narrow) - 1) for taken in drawn)
            self._console.control(Control(*((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * more))


class Warnings(logging.Handler):
    """Remembers the newest warnings, with the step during which they came."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress
        self._newest: deque[str] = deque(maxlen=MAX_WARNINGS)

    def emit(self, record: logging.LogRecord) -> None:
        sentence = " ".join(record.getMessage().split())
        if not sentence.startswith("step "):
            sentence = f"step {self._progress.done}: {sentence}"
        self._newest.append(sentence)

    def newest(self) -> list[str]:
        return list(self._newest)


class Rates:
    """MFU of each pool over the newest steps, from the FLOPs that workers report of their spans."""

    def __init__(self, events: EventLog, peak: float) -> None:
        self._events, self._peak = events, peak
        self._step, self._shares = -1, dict[str, float]()

    def shares(self, progress: Progress) -> Mapping[str, float]:
        """Counted once for each step."""
        if progress.done != self._step and progress.line:
            self._step = progress.done
            self._shares = self._counted()
        return self._shares

    def _counted(self) -> dict[str, float]:
        recent = list(self._events.recent)
        steps = [event for event in recent if event["event"] == "step"][-5:]
        if not steps:
            return {}
        first, last = steps[0]["started"], steps[-1]["ended"]
        pools: dict[str, dict[str, float]] = {}
        for event in recent:
            if event["event"] == "span" and "flops" in event and first <= event["end"] <= last:
                places = pools.setdefault(pool_of(event["worker"]), {})
                places[event["worker"]] = places.get(event["worker"], 0.0) + event["flops"]
        return {
            pool: sum(places.values()) / len(places) / max(last - first, 1e-9) / self._peak
            for pool, places in pools.items()
        }


def stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Handlers of all loggers that write to a stream: those of libraries keep the stream that they found."""
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = dict.fromkeys(handler for logger in loggers for handler in getattr(logger, "handlers", ()))
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            yield handler
