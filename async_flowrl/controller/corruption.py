"""Distinguishes a bad receiver or network from a bad sender when deliveries arrive corrupted."""

from dataclasses import dataclass

from checkpoint_engine.errors import error_names

MAX_CORRUPTED_WORKERS_IN_A_ROW = 3
"""Workers given up over corrupted weights while nothing new arrived anywhere; with so many the sender is at fault."""


class CorruptedVersion(RuntimeError):
    """A version arrives damaged everywhere: what is sent is not what was sealed, and no replacement can help."""


@dataclass
class CorruptionWatch:
    newest: int = -1
    """Highest version that any worker has acknowledged."""
    given_up: int = 0

    def acknowledged(self, version: int) -> None:
        if version > self.newest:
            self.newest, self.given_up = version, 0

    def gave_up(self, error: BaseException) -> None:
        """Raises CorruptedVersion when too many workers in a row were given up over damaged weights."""
        self.given_up += "TransferCorrupted" in error_names(error)
        if self.given_up >= MAX_CORRUPTED_WORKERS_IN_A_ROW:
            raise CorruptedVersion(
                f"{self.given_up} workers in a row received damaged weights, however often they were sent; nothing "
                f"newer than version {self.newest} has arrived anywhere: {error}"
            ) from error
