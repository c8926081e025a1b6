"""Model FLOPs utilisation (MFU): the share of the device's peak FLOP/s that a network uses."""

from collections.abc import Mapping
from typing import Any


def mfu(summary: Mapping[str, Any]) -> str:
    """Returns text such as "rollout 31.0%, trainer 42.0%" from a run's summary.json; empty if the peak is not known."""
    known = {pool: value for pool, value in (summary.get("mfu") or {}).items() if value is not None}
    return ", ".join(f"{pool} {value:.1%}" for pool, value in known.items())


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """Returns flops / seconds / peak, which is 1 at full use; None if `peak` (in FLOP/s) is None or `seconds` is 0."""
    return flops / seconds / peak if peak is not None and seconds > 0 else None
