"""Records which files of the project execute when, in all processes of a run and all their threads.

`environment` makes Python run this file's `start` in every process of the run, before anything else. A process then
notes, for each file of the project, the tenths of seconds in which a function of it was called.
"""

import atexit
import json
import os
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

CALLS, PROJECT = "VISITED_CALLS", "VISITED_PROJECT"
PACKAGES = ("async_flowrl", "separation", "checkpoint_engine")
TENTHS = 10
WRITE_SECONDS = 0.5

_visited: dict[str, set[int]] = defaultdict(set)
_first: dict[str, float] = {}


def environment(calls: Path, project: Path) -> dict[str, str]:
    """Returns the environment of a run whose processes write what they visit of `project` into the folder `calls`."""
    site = calls / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("from benchmarks import visited\nvisited.start()\n")
    return {CALLS: str(calls), PROJECT: str(project), "PYTHONPATH": os.pathsep.join((str(site), str(project)))}


def start() -> None:
    """Begins to record this process; what it has recorded is written to a file every half second and at its end."""
    project = os.environ[PROJECT] + os.sep
    packages = tuple(project + package + os.sep for package in PACKAGES)

    def note(code: CodeType) -> None:
        name = code.co_filename
        if name.startswith(packages) and code.co_name != "<module>":
            file, now = name.removeprefix(project), time.time()
            _first.setdefault(file, now)
            _visited[file].add(int(now * TENTHS))

    if sys.version_info >= (3, 12):
        monitoring: Any = sys.monitoring
        tool, begins = monitoring.PROFILER_ID, monitoring.events.PY_START
        monitoring.use_tool_id(tool, "visited")
        monitoring.register_callback(tool, begins, lambda code, offset: note(code))
        monitoring.set_events(tool, begins)
    else:

        def called(frame: FrameType, event: str, argument: Any) -> None:
            # A coroutine that goes on is a call, too, but of its instruction RESUME with another argument than 0.
            if event == "call" and frame.f_code.co_code[frame.f_lasti + 1] == 0:
                note(frame.f_code)

        sys.setprofile(called)
        threading.setprofile(called)
        _call_in_own_threads()
    threading.Thread(target=_write_often, daemon=True).start()
    atexit.register(_write)


def _call_in_own_threads() -> None:
    """Has a worker's calls made in threads that Python starts: those that Ray's own code starts are not profiled."""
    from separation.worker_process import Host

    host: Any = Host
    for name in ("run", "run_split"):

        def profiled(self: Any, *arguments: Any, _method: Any = getattr(host, name)) -> Any:  # noqa: B008
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(_method, self, *arguments).result()

        setattr(host, name, profiled)


def _write_often() -> None:
    while True:
        time.sleep(WRITE_SECONDS)
        _write()


def _write() -> None:
    record = {name: [_first[name], sorted(times.copy())] for name, times in _visited.copy().items()}
    target = Path(os.environ[CALLS], f"{os.getpid()}.json")
    work = target.with_suffix(".part")
    work.write_text(json.dumps(record))
    work.replace(target)


def files_within(calls: Path, began: float, ended: float) -> set[str]:
    """Returns the files of which any process called a function between two times, in unix seconds."""
    wanted = range(int(began * TENTHS), int(ended * TENTHS) + 1)
    return {
        name
        for process in calls.glob("*.json")
        for name, (_, times) in json.loads(process.read_text()).items()
        if any(time in wanted for time in times)
    }


def files_before(calls: Path, name: str) -> set[str]:
    """Returns the files that the process which runs `name` (a file) had called functions of until then."""
    for process in calls.glob("*.json"):
        record = json.loads(process.read_text())
        if name in record:
            reached = record[name][0]
            return {file for file, (first, _) in record.items() if first <= reached}
    raise ValueError(f"no process has called a function of {name}")
