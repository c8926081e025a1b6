"""Configuration keys that are gone; a configuration that has one is refused with what to use instead."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

REMOVED: Mapping[str, str] = {
    "debug": "tests and benchmarks give a run other worker classes (benchmarks/disturbed.py)",
    "limits.successors": "all trainer ranks are started again when one dies; limits.recoveries says how often",
    "*reward.terms.*.serve.hung_calls": "a server hangs if its health path gives no 200 for serve.hung_seconds",
    "*reward.terms.*.serve.requirements": "begin command with uv run --isolated --no-project --with-requirements FILE",
}
"""Key (* is any name), or section with all its keys → what to do instead."""


def removed(key: str) -> str | None:
    """Returns a sentence if `key` or a section that it is in was removed, else None."""
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    gone = next(((name, old) for name in names for old in REMOVED if fnmatchcase(name, old)), None)
    return None if gone is None else f"configuration key {gone[0]} is gone: {REMOVED[gone[1]]}"
