"""Errors of a delivery, and what each asks for: send again, replace the receiver, or stop the run."""

from enum import Enum


class EngineError(RuntimeError):
    """Base of every error this package raises about a delivery."""


class TransferCorrupted(EngineError):
    """The bytes that arrived are not the bytes that left (digest, truncation). Sending them again may help."""


class TransferFailed(EngineError):
    """A transport gave up: deadline passed, peer gone, or aborted. Sending again, or another way, may help."""


class WeightsMismatch(EngineError):
    """Name, shape, dtype, rank, alpha, version or binding is wrong: no resend can help, the run must stop."""


class VersionGone(EngineError):
    """A version that was asked for is not retained any more."""


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
