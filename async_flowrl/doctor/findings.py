"""Findings, the one-line results of checks, and the exit code that follows from all of them."""

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
    """Subject of the check, e.g. `transport nccl`."""
    status: str
    """One of STATUSES."""
    sentence: str
    """The result, with its numbers."""
    advice: str = ""
    """Advice after a warning or a failure, or the reason why something was skipped; may be empty."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers behind the sentence for doctor.json; units are seconds and bytes unless the name says otherwise."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"a finding's status is one of {', '.join(STATUSES)}, got {self.status!r}")

    def line(self) -> str:
        """Returns the finding as the console shows it."""
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.status:8} {self.name}: {self.sentence}{advice}"


def as_finding(record: Mapping[str, Any]) -> Finding:
    """Reverses `dataclasses.asdict`. Raises TypeError for other keys."""
    return Finding(**record)


def exit_code(findings: Iterable[Finding]) -> int:
    """Returns 1 if any finding failed, else 0; warnings and skipped findings are no failures."""
    return exit_codes.ERROR if any(finding.status == FAILED for finding in findings) else exit_codes.OK


def failed(name: str, error: BaseException, advice: str) -> Finding:
    """Returns a failed finding with the error's message, or its type if the message is empty."""
    said = str(error).strip() or type(error).__name__
    return Finding(name, FAILED, " ".join(said.split()), advice)
