"""The files of a finished run, as `verify` reads them."""

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.types import TRAIN

FINAL_STATES = ("TRAINED", "SKIPPED")


class Broken(ValueError):
    """Raised if the files contradict a guarantee."""


@dataclass(frozen=True)
class RunFiles:
    """The records of a finished run."""

    root: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    history: list[Event]
    """The events without those that a return to a checkpoint has undone."""

    @classmethod
    def read(cls, root: Path) -> "RunFiles":
        """Reads the files in the folder `root`.

        Raises FileNotFoundError if the run is not finished, and ValueError if a file is not JSON.
        """
        metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((root / "summary.json").read_text())
        return cls(root, summary, metrics, effective(read_events(root / "events.jsonl")))

    @property
    def max_staleness(self) -> int:
        return int(self.summary["max_staleness"])

    @property
    def steps(self) -> int:
        return int(self.summary["steps"])

    @cached_property
    def finished(self) -> list[Event]:
        """The events in which training tickets reached a final state, in order."""
        return [e for e in self.history if e["event"] == "ticket" and e["kind"] == TRAIN and e["state"] in FINAL_STATES]

    @cached_property
    def sent(self) -> dict[tuple[str, int], set[str]]:
        """(stream, version) → the digests with which it was sent."""
        sent: dict[tuple[str, int], set[str]] = defaultdict(set)
        for event in self.history:
            if event["event"] == "version" and event["state"] == "sent":
                sent[event["stream"], event["version"]].add(event["digest"])
        return sent
