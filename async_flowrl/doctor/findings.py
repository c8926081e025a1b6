"""Findings: what a check says, one line each, and what all of them together mean for the exit code."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config import exit_codes

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
STATUSES = (OK, WARNING, FAILED, SKIPPED)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    """What was looked at, e.g. `transport nccl`."""
    status: str
    """One of STATUSES."""
    sentence: str
    """What was found, with its numbers."""
    advice: str = ""
    """What to do; said for a warning and a failure, and why for what was skipped."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The numbers behind the sentence, as they go into doctor.json: seconds, bytes and ratios unless named."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a finding's status is one of {', '.join(STATUSES)}, got {self.status!r}")

    def line(self) -> str:
        """As it stands on the console."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.status:8} {self.name}: {self.sentence}{advice}"


def as_finding(record: Mapping[str, Any]) -> Finding:
    """What `asdict` made. Raises TypeError for anything else."""
    return Finding(**record)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where anything failed, else 0: a warning or something skipped is no failure."""
    return exit_codes.ERROR if any(finding.status == FAILED for finding in findings) else exit_codes.OK


def failed(name: str, error: BaseException, advice: str) -> Finding:
    """A failure that says what the error says; its type where it says nothing."""
    said = str(error).strip() or type(error).__name__
    return Finding(name, FAILED, " ".join(said.split()), advice)
