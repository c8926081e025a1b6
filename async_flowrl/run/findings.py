"""Findings, the one-line results of checks."""

from dataclasses import dataclass

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"  # Statuses of a finding.


@dataclass(frozen=True)
class Finding:
    name: str  # Subject of the check, e.g. `run directory`.
    status: str  # OK, WARNING, FAILED or SKIPPED.
    sentence: str  # The result, with its numbers.
    advice: str = ""  # Advice after a warning or a failure, or the reason why something was skipped; may be empty.

    def line(self) -> str:
        advice = f"; {self.advice}" if self.advice else ""
        return f"{self.status:8} {self.name}: {self.sentence}{advice}"


def verdict(name: str, sentence: str, *problems: tuple[bool, str, str]) -> Finding:
    """Returns the first of the `problems` (it exists, status, advice) that exists as a finding; OK without any."""
    status, advice = next((problem[1:] for problem in problems if problem[0]), (OK, ""))
    return Finding(name, status, sentence, advice)


def failed(name: str, error: BaseException, advice: str, status: str = FAILED) -> Finding:
    return Finding(name, status, " ".join(str(error).split()) or type(error).__name__, advice)
