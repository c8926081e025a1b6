"""Errors of a delivery, and the verdict on each: send again, replace the receiver, or stop the run."""

from enum import Enum


class EngineError(RuntimeError):
    """Base class of the errors of a delivery."""


class TransferCorrupted(EngineError):
    """Raised if bytes arrive damaged (wrong digest or length). Sending them again may help."""


class TransferFailed(EngineError):
    """Raised if a transport gives up: a deadline passed, a peer is gone, or it was aborted. Sending again may help."""


class WeightsMismatch(EngineError):
    """Raised if a name, shape, dtype, rank, alpha, version or binding is wrong. The run must stop: no resend helps."""


class VersionGone(EngineError):
    """Raised if a requested version is not retained (any more)."""


class MemberBusy(EngineError):
    """Raised if a collective cannot begin because a member is busy with an earlier delivery. Nothing has failed."""


class Verdict(Enum):
    RESEND = "resend"
    REPLACE = "replace"
    STOP = "stop"


# RefLost is separation's: the payload was lost with the node that held it, e.g. of a receiver that passed it on.
_RESEND = {"TransferCorrupted", "TransferFailed", "TimeoutError", "RefLost"}
_REPLACE = {"WorkerDied", "ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"}


def verdict(error: BaseException) -> Verdict:
    """Returns the reaction to an error, by the names of its classes or by its `kind` (see `error_names`)."""
    # Errors that are not known to be cured by a resend or a replacement stop the run.
    names = error_names(error)
    if names & _RESEND:
        return Verdict.RESEND
    return Verdict.REPLACE if names & _REPLACE else Verdict.STOP


def error_names(error: BaseException) -> set[str]:
    """Returns the names of the error's classes, or only its `kind`: the class name of an error in another process."""
    kind = getattr(error, "kind", None)
    return {kind} if isinstance(kind, str) else {cls.__name__ for cls in type(error).__mro__}
