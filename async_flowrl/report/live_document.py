"""Cache of the report document for runs that still go on: the files are read again only if they have changed."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from async_flowrl.observability.run_directory import is_held
from async_flowrl.report.document import Document, document
from async_flowrl.report.folders import MAX_RUNS, NoRun, is_run, runs_in
from async_flowrl.report.page import render

MIN_SECONDS = 1.0
"""Smallest time between two readings, for any number of browsers."""
MAX_SHARE = 0.1
"""After a reading that took t seconds, the next one waits at least t / MAX_SHARE, so reading needs little CPU time."""
FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", "evaluations.jsonl", "summary.json", "logs/controller.log")
FOLDERS = ("images", "checkpoints")

Fingerprint = tuple[object, ...]


class LiveDocument:
    """The newest document of the runs in `folders`, and its page. Thread-safe: one thread reads, the others wait."""

    def __init__(self, folders: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self.trouble: str | None = None
        """Reason why the newest reading failed, None if it did not; after a failure the previous document is kept."""
        self.readings = 0
        """Number of readings so far."""
        self._runs: Sequence[Path] = ()
        self._folders, self._clock = list(folders), clock
        self._turn = threading.Lock()
        self._document: Document | None = None
        self._content: bytes | None = None
        self._page: bytes | None = None
        self._seen: Fingerprint | None = None
        self._next = float("-inf")

    def content(self) -> bytes | None:
        """The document as JSON in UTF-8; None if no run could be read yet."""
        with self._turn:
            self._renew()
            return self._content

    def page(self) -> bytes | None:
        """The HTML page with the newest document; None if no run could be read yet."""
        with self._turn:
            self._renew()
            if self._page is None and self._document is not None:
                self._page = render(self._document, live=True).encode()
            return self._page

    def runs(self) -> Sequence[Path]:
        """Run directories in the order of the document."""
        with self._turn:
            if not self._runs:
                self._renew()
            return self._runs

    def _renew(self) -> None:
        began = self._clock()
        if began < self._next:
            return
        runs = begun(self._folders)
        seen = tuple(map(fingerprint, runs))
        self._next = began + MIN_SECONDS
        if not runs or seen == self._seen:
            return
        self.readings += 1
        try:
            newest = document(runs)
            content = json.dumps(newest, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, OSError) as error:  # e.g. a file is being written now; the next call reads it again
            self.trouble = str(error)
        else:
            self.trouble, self._seen = None, seen
            self._runs, self._document, self._content, self._page = runs, newest, content, None
        ended = self._clock()
        self._next = max(began + MIN_SECONDS, ended + (ended - began) / MAX_SHARE)


def begun(folders: Sequence[Path]) -> list[Path]:
    """The run directories in `folders` that have begun (have metrics.jsonl), at most MAX_RUNS.

    A folder of a sweep may hold more of them at every call.
    """
    runs: list[Path] = []
    for folder in folders:
        if is_run(folder) or not (folder / "config.yaml").is_file():
            try:
                runs += [run for run in runs_in([folder]) if run not in runs]
            except NoRun:
                continue
    return runs[:MAX_RUNS]


def may_begin(folder: Path) -> bool:
    """True if the folder is or holds a run directory, or one of a run that is starting (with config.yaml only)."""
    return any(any(folder.glob(f"{below}config.yaml")) for below in ("", "*/", "*/*/"))


def fingerprint(run: Path) -> Fingerprint:
    """A value that changes if the run's document may change: times and sizes of files, and whether the run goes on."""
    folders = [run / name for name in FOLDERS]
    folders += [path for path in (run / "images").glob("*") if path.is_dir()]
    return (*(_state(run / name) for name in FILES), *(_state(path) for path in folders), is_held(run / ".lock"))


def _state(path: Path) -> tuple[str, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return path.name, status.st_mtime_ns, status.st_size
