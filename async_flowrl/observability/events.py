"""events.jsonl: the history of a run, one JSON object per event of a ticket, a version or a worker.

The controller writes it; reports, planner and verification read it, and no decision of a run depends on it.
docs/run_directory.md lists the events and their fields. Every event has `time`; all times are unix seconds.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_flowrl.config.paths import replace_file
from async_flowrl.observability.intervals import Interval
from async_flowrl.observability.ledger import PoolLedger, pool_of
from async_flowrl.types import Span

FLUSH_SECONDS = 1.0
Event = dict[str, Any]


class EventLog:
    """Appends events to the file `path`. Thread-safe.

    Events are buffered. All of them are written by `flush` and `close`, by each `step` event, and by the first event
    that comes FLUSH_SECONDS or more after the last write. `clock` and `offset` together give unix seconds.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float], *, offset: float = 0.0, ledger: PoolLedger | None = None
    ) -> None:
        self._clock, self._offset, self._ledger = clock, offset, ledger
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._states: dict[str, str] = {}
        self.memory: dict[str, int] = {}  # Pool → the largest `Span.memory` of its workers so far.
        self._flushed = self.now()
        cut_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")

    def now(self) -> float:
        return self._clock() + self._offset

    def event(self, event: str, **fields: Any) -> None:
        now = self.now()
        record = {"time": now, "event": event, **fields}
        line = json.dumps(record, default=str)
        with self._lock:
            self._buffer.append(line + "\n")
            # A checkpoint is written after its step, and the file must have that step's events even after a kill.
            if event == "step" or now - self._flushed >= FLUSH_SECONDS:
                self._write(now)

    def state(self, worker: str, state: str) -> None:
        """Tells the ledger that `worker` is in `state` now; records an event if the state is new."""
        if self._ledger is not None:
            state = self._ledger.enter(worker, state)
        if self._states.get(worker) != state:
            self._states[worker] = state
            self.event("state", worker=worker, state=state)

    def span(self, worker: str, span: Span, **fields: Any) -> None:
        counted = {name: value for name in ("flops", "bytes", "memory") if (value := getattr(span, name)) is not None}
        self.event("span", worker=worker, name=span.name, start=span.start, end=span.end, **fields, **counted)
        if span.memory is not None:
            pool = pool_of(worker)
            self.memory[pool] = max(span.memory, self.memory.get(pool, 0))

    def flush(self) -> None:
        with self._lock:
            self._write(self.now())

    def close(self) -> None:
        with self._lock:
            self._write(self.now())
            self._file.close()

    def _write(self, now: float) -> None:
        self._flushed = now
        if self._buffer:
            self._file.write("".join(self._buffer))
            self._file.flush()
            self._buffer.clear()


def cut_unfinished_line(path: Path) -> None:
    """Truncates a file of lines after its last line end; does nothing if the file is missing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def forget_steps(path: Path, step: int) -> None:
    """Removes the lines of `step` and later from a file of lines, each of which has a `step`."""
    replace_file(path, "".join(json.dumps(line) + "\n" for line in read_events(path) if line["step"] < step))


def read_events(path: Path, *, skipped: Sequence[str] = ()) -> Iterator[Event]:
    """The JSON objects of a file of lines, oldest first; an unfinished last line is left out.

    Lines that contain one of the texts `skipped` are not parsed. Raises FileNotFoundError, and ValueError with file and
    line number for a line that is not JSON.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            if any(text in line for text in skipped):
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from error


def effective(events: Iterable[Event]) -> list[Event]:
    """The events without those that rollbacks made void (a rollback: the run went back to the checkpoint of step c).

    A rollback to step c removes the earlier events `ticket`, `step` and `unscored` of steps >= c, and the events
    `version` of versions > c. All other events stay, the rollback included.
    """
    kept: list[Event] = []
    for event in events:
        if event["event"] == "rollback":
            kept = [earlier for earlier in kept if not _undone(earlier, event["step"])]
        kept.append(event)
    return kept


def steps_of(history: Iterable[Event]) -> list[Event]:
    return sorted((event for event in history if event["event"] == "step"), key=lambda event: int(event["step"]))


def step_window(history: Sequence[Event]) -> Interval:
    """(start of the first step, end of the last step) in unix seconds; the range of all events if there is no step."""
    if steps := steps_of(history):
        return min(event["started"] for event in steps), max(event["ended"] for event in steps)
    times = [event["time"] for event in history] or [0.0, 1.0]
    return min(times), max(times)


def _undone(event: Event, step: int) -> bool:
    if event["event"] in ("ticket", "step", "unscored"):
        return bool(event["step"] >= step)
    return event["event"] == "version" and bool(event["version"] > step)
