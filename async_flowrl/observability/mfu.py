"""Model FLOPs utilisation, as a number and in words."""

from collections.abc import Mapping
from typing import Any


def mfu(summary: Mapping[str, Any]) -> str:
    """Per pool, from a run's summary; empty where the device's peak is not known."""
    known = {pool: value for pool, value in (summary.get("mfu") or {}).items() if value is not None}
    return ", ".join(f"{pool} {value:.1%}" for pool, value in known.items())


def utilisation(flops: float, seconds: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of `peak` FLOP/s; None where that is not known."""
    return flops / seconds / peak if peak is not None and seconds > 0 else None
