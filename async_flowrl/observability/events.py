"""events.jsonl: what happened to every ticket, version and worker, one JSON object per line. Nothing is decided by it.

docs/run_directory.md lists the events and their fields. Every event has `time`; all times are unix seconds.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from async_flowrl.observability.ledger import PoolLedger

FLUSH_SECONDS = 1.0
Event = dict[str, Any]


class EventLog:
    """Appends to `path`; the newest events are also in `recent`. Safe between threads.

    An event is on disk at most a second after the next one, after the next `step` event, and after `flush`. A line
    that a killed process left unfinished is cut off when the file is opened again.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float], *, ledger: PoolLedger | None = None, keep: int = 10_000
    ) -> None:
        self.recent: deque[Event] = deque(maxlen=keep)
        self._clock, self._ledger = clock, ledger
        self._lock = threading.Lock()
        self._buffer: list[str] = []
        self._states: dict[str, str] = {}
        self._flushed = clock()
        cut_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8")

    def now(self) -> float:
        """Unix seconds, as events are stamped."""
        return self._clock()

    def event(self, event: str, **fields: Any) -> None:
        """Records one event, now."""
        now = self._clock()
        record = {"time": now, "event": event, **fields}
        line = json.dumps(record, default=str)
        with self._lock:
            self.recent.append(record)
            self._buffer.append(line + "\n")
            # A checkpoint follows its step: what it contains must be in the history of a run that is killed after it.
            if event == "step" or now - self._flushed >= FLUSH_SECONDS:
                self._write(now)

    def state(self, worker: str, state: str) -> None:
        """Records that `worker` is now in `state`, if it was not, and books its time in the ledger if there is one."""
        if self._ledger is not None:
            state = self._ledger.enter(worker, state)
        if self._states.get(worker) != state:
            self._states[worker] = state
            self.event("state", worker=worker, state=state)

    def flush(self) -> None:
        with self._lock:
            self._write(self._clock())

    def close(self) -> None:
        with self._lock:
            self._write(self._clock())
            self._file.close()

    def _write(self, now: float) -> None:
        self._flushed = now
        if self._buffer:
            self._file.write("".join(self._buffer))
            self._file.flush()
            self._buffer.clear()


def cut_unfinished_line(path: Path) -> None:
    """Truncates a file of lines after its last line end; a missing file is left missing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, oldest first, without an unfinished last line. Raises ValueError naming a broken line."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error


def effective(events: Iterable[Event]) -> list[Event]:
    """The history that counts: what a rollback to step c undid is left out.

    That is: steps >= c, the transitions of tickets that had not been trained in a step < c, what their groups lacked,
    and versions > c.
    """
    kept: list[Event] = []
    for event in events:
        if event["event"] == "rollback":
            kept = [earlier for earlier in kept if not _undone(earlier, event["step"])]
        kept.append(event)
    return kept


def _undone(event: Event, step: int) -> bool:
    if event["event"] in ("ticket", "step", "unscored"):
        return bool(event["step"] >= step)
    return event["event"] == "version" and bool(event["version"] > step)
