"""Report of the events that the pretended device saw in this process, each with its place in the program."""

import atexit
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pretended.cuda import peak_bytes
from pretended.library import Told, call, load

RACE, SYNC, BEHIND, COLLECTIVE = "race", "sync", "behind another thread", "collective"
KILLED = "killed by the watchdog"
FRAMES = 8
SECONDS_BETWEEN_REPORTS = 0.3
_SITE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class Seen:
    """Something that happened, and the innermost frames of the program: "worker.py:12 < job.py:40"."""

    kind: str
    text: str
    where: str

    def __str__(self) -> str:
        return f"{self.text} @ {self.where}"


_seen: Counter[Seen] = Counter()


def _where() -> str:
    places: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(places) < FRAMES:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith(_SITE):
            places.append(f"{'/'.join(name.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places) or "a thread without Python: the backward pass"


def tell(kind: str, text: str) -> None:
    _seen[Seen(kind, text, _where())] += 1


@Told
def _told(kind: bytes, text: bytes) -> None:
    tell(kind.decode(), text.decode())


def seen(kind: str) -> Counter[Seen]:
    """How often what happened where, since the process began."""
    return Counter({one: count for one, count in _seen.copy().items() if one.kind == kind})


@contextmanager
def watched(kind: str) -> Iterator[Counter[Seen]]:
    """What happens during the block; filled at its end."""
    before, found = seen(kind), Counter[Seen]()
    yield found
    found.update(seen(kind) - before)


def forget() -> None:
    """So that a planted fault is not taken for one of the program's."""
    _seen.clear()


def operators() -> list[str]:
    """Dispatched to the device so far: "aten::mm"."""
    return str(call("operators")).splitlines()


def _report() -> str:
    lines = [
        {"kind": one.kind, "count": count, "text": one.text, "where": one.where}
        for one, count in _seen.copy().most_common()
    ]
    facts = {
        "pid": os.getpid(),
        "command": " ".join(sys.argv)[:100],
        "peak_bytes": [peak_bytes(device) for device in range(int(str(call("device_count"))))],
        "operators": operators(),
        "nondeterministic": str(call("nondeterministic")).splitlines(),
        "seen": lines,
    }
    return json.dumps(facts, indent=1)


def _write(folder: Path) -> None:
    """A process that used no device has nothing to say."""
    if not operators():
        return
    path = folder / f"{os.getpid()}.json"
    text = _report()
    partial = path.with_suffix(f".{threading.get_ident()}")
    partial.write_text(text)
    partial.replace(path)


def _write_often(folder: Path) -> None:
    """Workers may be killed at any time."""
    while True:
        time.sleep(SECONDS_BETWEEN_REPORTS)
        _write(folder)


def install() -> None:
    """Listens to the device; writes to the folder PRETEND_REPORT, if that is set."""
    load().pretend_tell(_told)
    if folder := os.environ.get("PRETEND_REPORT"):
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=_write_often, args=(path,), name="pretend-report", daemon=True).start()
        atexit.register(_write, path)
