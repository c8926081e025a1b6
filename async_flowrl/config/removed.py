"""Configuration keys that earlier versions had, and what takes their place."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

REMOVED: Mapping[str, str] = {
    "*reward.terms.*.serve.requirements": "begin command with uv run --isolated --no-project --with-requirements FILE",
}
"""Key (* is any name), or section with all its keys → what to do instead."""


def removed(key: str) -> str | None:
    """Returns a sentence if `key` or a section that it is in was removed, else None."""
    parts = key.split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    gone = next(((name, old) for name in names for old in REMOVED if fnmatchcase(name, old)), None)
    return None if gone is None else f"configuration key {gone[0]} is gone: {REMOVED[gone[1]]}"
