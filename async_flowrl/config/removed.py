"""Configuration keys that are gone; a configuration that has one is refused with what to use instead."""

from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "debug": "tests and benchmarks give a run other worker classes (benchmarks/disturbed.py)",
}
"""Old key → what to use instead."""
