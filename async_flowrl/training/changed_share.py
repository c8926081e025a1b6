"""The share of the trained values that a version changed, where it is narrower than the float32 masters."""

import logging
from dataclasses import replace

from async_flowrl.training.messages import UpdateStats

logger = logging.getLogger(__name__)

MIN_CHANGED_SHARE = 0.01
"""A step that changes a smaller share of what is trained, as it is computed with, is worth a warning."""


class ChangedShare:
    """Adds the share to a step's metrics, and warns once in a run if it is small."""

    def __init__(self, dtype: str) -> None:
        """`dtype` is `model.dtype`, for the warning."""
        self._dtype, self._warned = dtype, False

    def added(self, stats: UpdateStats, share: float | None) -> UpdateStats:
        """Returns the statistics with the share; without a step or a share, as they are."""
        if stats.skipped or share is None:
            return stats
        if share < MIN_CHANGED_SHARE and not self._warned:
            self._warned = True
            logger.warning(
                "step %d changed only %.2g %% of the trained values as rollouts compute with them (%s): the float32 "
                "masters moved, but most of that is lost in rounding until it adds up; consider a larger "
                "trainer.learning_rate, or model.dtype=float32",
                stats.step,
                100 * share,
                self._dtype,
            )
        return replace(stats, metrics={**stats.metrics, "adapter/changed_share": share})
