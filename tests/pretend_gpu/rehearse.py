"""Runs of the whole program on pretended GPUs, as a user starts it, and the reports of its processes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.integration.runs import WHOLE, Run, finish, start

SHORT = (*WHOLE, "total_steps=3", "evaluate.max_prompts=1", "evaluate.images_per_prompt=1", "model.dtype=bfloat16")


@dataclass(frozen=True)
class Rehearsal(Run):
    """A run, and one report per process that used a device."""

    reports: tuple[dict[str, Any], ...] = ()

    def seen(self, kind: str) -> list[str]:
        """What happened where in any process: "12 x item @ worker.py:3"."""
        return [
            f"{one['count']} x {one['text']} @ {one['where']}"
            for report in self.reports
            for one in report["seen"]
            if one["kind"] == kind
        ]

    def flawless(self) -> None:
        """No race, no process that torch's watchdog ends, no operator whose bits vary."""
        assert self.reports, "no process used a device"
        assert self.seen("race") == []
        assert self.seen("killed by the watchdog") == []
        assert {name for report in self.reports for name in report["nondeterministic"]} == set()

    def delivered(self, transport: str) -> None:
        """Every version went by this transport, but for those published while a worker was busy with an earlier one."""
        sync = self.summary["sync"]
        assert (sync["transport"], sync["fallbacks"]) == (transport, 0)
        assert sync["member_busy"] < sync["publishes"]


def rehearse(
    folder: Path, mode: str, *overrides: str, code: int = 0, environment: dict[str, str] | None = None
) -> Rehearsal:
    """A short run in bfloat16 on a Ray cluster of its own with four pretended GPUs."""
    reports = folder.with_name(f"{folder.name}-reports")
    strict = {"PRETEND_NCCL_WATCHDOG": "end", "PRETEND_SHARED_DEVICE": ""}
    with mock.patch.dict(os.environ, {"PRETEND_REPORT": str(reports), **strict, **(environment or {})}):
        process = start(folder, mode, *SHORT, *overrides)
    finish(process, code)
    return Rehearsal(folder, tuple(json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))))
