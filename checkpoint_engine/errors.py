"""What can go wrong with a delivery, sorted by what it asks for: send it again, or stop."""


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
