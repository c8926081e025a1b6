"""OwedKL: an optimizer step whose KL is measured after it, by one of the processes that have taken it.

With `placement=shared` the measurement is a unit of work of its own. It belongs to the next optimizer step, and so
nobody waits for a ticket at the end of the step that is measured (controller/shared.py, `measures_later`). All ranks
would measure the same, so one does: that which will be free first. The value is added to the line of metrics of the
measured step.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from async_flowrl.controller.context import Context, book_span
from async_flowrl.controller.shared import busy_ranks
from async_flowrl.controller.step_metrics import StepStatistics
from async_flowrl.training.messages import Measured
from separation.group import Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwedKL:
    """The measurement of an optimizer step that is still to be made."""

    statistics: StepStatistics
    """Statistics of the training step that it belongs to."""
    update: int
    """Number of the optimizer step in its batch."""
    workers: frozenset[str]
    """Names of the ranks that have taken it; others cannot measure it."""

    def chosen(self, ctx: Context, ranks: Sequence[int], workers: Sequence[Worker], now: float) -> int | None:
        """Returns that of the living `ranks` which can measure it and will be free first, the lowest of equal ones.

        `workers` are those of all ranks, and `now` is the time in seconds. Returns None, with a warning, if all ranks
        that have taken the step have died.
        """
        able = [rank for rank in ranks if workers[rank].name in self.workers]
        if not able:
            logger.warning("step %d: its KL is not measured, as all that have taken it died", self.statistics.step)
            return None
        busy = busy_ranks(ctx, now)
        return min(able, key=lambda rank: (busy.get(rank, 0.0), rank in busy))

    async def measured(self, ctx: Context, worker: str, measured: Measured, *, step: int | None) -> None:
        """Adds what `worker` has measured to the metrics of the step.

        `step` is the training step under way, whose line of metrics is not written yet; None if all are written. A line
        that cannot be written anew, because the disk is full for example, is logged and stays as it is.
        """
        for span in measured.spans:
            book_span(ctx.observer, worker, span)
        metrics = self.statistics.add_measurement(self.update, measured.metrics)
        if metrics and self.statistics.step != step:
            try:
                await ctx.steps.amend(ctx, self.statistics.step, metrics)
            except OSError as error:
                logger.warning("step %d: its KL could not be added to its metrics: %s", self.statistics.step, error)
