"""Options and counts of a delivery, and what its errors ask for."""

from dataclasses import dataclass
from enum import Enum

from checkpoint_engine.fanout import DEGREE


class Verdict(Enum):
    """What an error asks for."""

    RESEND = "resend"
    REPLACE = "replace"
    STOP = "stop"


_RESEND = {"TransferCorrupted", "TransferFailed", "TimeoutError"}
_REPLACE = {"WorkerDied", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"}


def verdict(error: BaseException) -> Verdict:
    """Judges an error by its class name, or by its `kind` where it stands for one raised in another process.

    Whatever is not known to be cured by a resend or a replacement stops the run.
    """
    names = error_names(error)
    if names & _RESEND:
        return Verdict.RESEND
    return Verdict.REPLACE if names & _REPLACE else Verdict.STOP


def error_names(error: BaseException) -> set[str]:
    """The names an error goes by: its remote `kind`, or its classes."""
    kind = getattr(error, "kind", None)
    return {kind} if isinstance(kind, str) else {cls.__name__ for cls in type(error).__mro__}


@dataclass(frozen=True)
class DeliveryOptions:
    """`deadline` in seconds, for each single call to an end; `retain` versions can be asked for by joiners."""

    retries: int = 3
    deadline: float = 30.0
    retain: int = 2
    degree: int = DEGREE


@dataclass
class DeliveryStats:
    """Counts since the start; seconds by the loop's clock. `seconds` runs from staged to acknowledged by all."""

    publishes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    acknowledged: int = 0
    retries: int = 0
    corrupt: int = 0
    fallbacks: int = 0
    replaced: int = 0
