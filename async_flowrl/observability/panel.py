"""Live panel of a run on a terminal: a few rows at the bottom, with other output scrolling above them.

A timer thread redraws the panel every REFRESH_SECONDS; calls from the run only store what they are given.
"""

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
"""Newest warnings that the panel shows; the terminal above it has all of them."""
MIN_ROOM = 2
"""Rows of the terminal that the panel leaves free above itself."""


class LockedConsole(Console):
    """A rich console in which only one thread at a time composes and writes output.

    Live computes how far the cursor moves up from the panel's height at its last drawing, and writes later. If another
    thread drew a panel of another height in between, rows of that panel would stay on the terminal. Whoever needs the
    lock of a Live as well takes this one first: `with console: live.refresh()`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._writing = threading.RLock()
        super().__init__(*args, **kwargs)

    def __enter__(self) -> "LockedConsole":
        self._writing.acquire()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._writing.release()


class Panel:
    """Implements `Display` (console.py); it draws from the time it is made.

    Text written to stdout appears above the panel, and so does stderr if it is a terminal. The cursor stays visible and
    the terminal's modes stay unchanged, so the terminal remains usable after the process is killed.
    """

    def __init__(self, progress: Progress, now: Now, console: LockedConsole | None = None) -> None:
        self._progress, self._now = progress, now
        self._console = console or LockedConsole()
        self._glyphs = ASCII if self._console.options.ascii_only else Glyphs()
        self._warnings = Warnings(progress)
        self._pools: PoolLedger | None = None
        self._rates: Rates | None = None
        self._widths: tuple[int, tuple[int, ...]] = (self._console.width, ())
        self._failure: Exception | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], TextIO]] = []
        self._turn = threading.Lock()
        """Guards the progress: the timer thread must not read it while a step is being added."""
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
        """Stores a step. Raises the timer thread's exception if drawing failed; the Monitor then drops the panel."""
        if self._failure is not None:
            raise self._failure
        with self._turn:
            self._progress.step(step, metrics)

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Does nothing: the panel shows the newest step."""

    def evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        whose, metrics = evaluated(metrics)
        if whose is None:
            self._progress.evaluation = f"version {version}", metrics
        self._console.print(
            f"evaluation of {whose or f'version {version}'}: {evaluation_line(metrics)}", highlight=False, markup=False
        )

    def image(self, path: Path, version: int) -> None:
        """Does nothing: a terminal shows no pictures."""

    def samples(self, version: int, samples: Sequence[Sample]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Draws the panel a last time, leaves it on the terminal and restores the log handlers."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._now.ended = True
        logging.getLogger().removeHandler(self._warnings)
        try:
            for handler, stream in self._redirected:
                handler.setStream(stream)
            with self._console:
                self._live.stop()
        except Exception as error:  # e.g. the terminal was closed; the run's results do not depend on it
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
        """Starts rich's Live and lets log handlers write through it.

        Live hides the cursor; it is shown again at once, since a killed process could not do so.
        """
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
            except Exception as error:  # raised by the next `log`
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
        with self._console:
            self._clear_wrapped()
            if not self._closed.is_set():
                self._live.refresh()

    def _clear_wrapped(self) -> None:
        """Erases the extra rows of a panel that a terminal has wrapped after becoming narrower; Live ignores them."""
        width, drawn = self._widths
        narrow = self._console.width
        if narrow < width:
            more = sum(max(0, -(-taken // narrow) - 1) for taken in drawn)
            self._console.control(Control(*((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)) * more))


class Warnings(logging.Handler):
    """Log handler that keeps the newest MAX_WARNINGS warnings, each with the number of finished steps."""

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
    """Model FLOPs utilisation of each pool over the last five steps, from the FLOPs in the spans of its workers.

    `peak` is the peak FLOP/s of one worker's device.
    """

    def __init__(self, events: EventLog, peak: float) -> None:
        self._events, self._peak = events, peak
        self._step, self._shares = -1, dict[str, float]()

    def shares(self, progress: Progress) -> Mapping[str, float]:
        """Pool → share of the peak; computed once per step, {} before the first."""
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
    """Handlers of all loggers that write to a stream and not to a file.

    Handlers of libraries hold a stream object of their own, so redirecting sys.stderr alone does not reach them.
    """
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = dict.fromkeys(handler for logger in loggers for handler in getattr(logger, "handlers", ()))
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
            yield handler
