"""CorruptionWatch tells a bad sender from bad receivers when weights arrive corrupted; weights.py reports to it."""

from dataclasses import dataclass

from checkpoint_engine.errors import error_names

MAX_CORRUPTED_WORKERS_IN_A_ROW = 3
"""Workers given up over corrupted weights without a new version anywhere; with so many the sender is at fault."""


class CorruptedVersion(RuntimeError):
    """Raised if too many workers receive damaged weights, so that the sender is at fault and no replacement helps."""


@dataclass
class CorruptionWatch:
    """Counts the workers that were given up over damaged weights since a new version last arrived."""

    newest: int = -1
    """Highest version that any worker has acknowledged; -1 for none."""
    given_up: int = 0
    """Workers given up over damaged weights since `newest` was acknowledged for the first time."""

    def acknowledged(self, version: int) -> None:
        if version > self.newest:
            self.newest, self.given_up = version, 0

    def gave_up(self, error: BaseException) -> None:
        """Counts the worker if `error` is TransferCorrupted; raises CorruptedVersion if there are now too many."""
        self.given_up += "TransferCorrupted" in error_names(error)
        if self.given_up >= MAX_CORRUPTED_WORKERS_IN_A_ROW:
            raise CorruptedVersion(
                f"{self.given_up} workers in a row received damaged weights, however often they were sent; nothing "
                f"newer than version {self.newest} has arrived anywhere: {error}"
            ) from error
