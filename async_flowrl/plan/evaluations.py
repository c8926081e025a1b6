"""Evaluations in a simulated run: their tickets go through the real table, gate, dispatch and scoring.

An evaluation is `EvaluationWork.tickets` tickets of one version, made between training tickets. Nothing is fetched.
"""

import asyncio

from async_flowrl.controller.context import Context
from async_flowrl.plan.work import EvaluationWork
from async_flowrl.tickets.table import State


class PlannedEvaluations:
    """Runs evaluations one after another in background tasks, as `controller.evaluation.Evaluations` does."""

    def __init__(self, work: EvaluationWork | None) -> None:
        """`work` is None in a run without evaluations."""
        self._work = work
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._trained = False
        self.seconds: list[float] = []
        """Virtual seconds of each complete evaluation, from the delivery of its version to its last score."""

    def after(self, ctx: Context, version: int) -> None:
        """Starts the evaluation that is due when `version` has been made; raises the error of an earlier one."""
        for task in self._tasks:
            if task.done():
                task.result()
        self._tasks = [task for task in self._tasks if not task.done()]
        if self._work is not None and version % self._work.every == 0:
            self._tasks.append(asyncio.create_task(self._run(ctx, version, self._work.tickets)))

    async def drain(self) -> None:
        """Waits for the evaluation that is under way. Raises the error of one that failed.

        Those that wait for it are left out: they change no step any more, and where evaluations fall behind there may
        be many.
        """
        self._trained = True
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        """Cancels the evaluations that are not complete."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, ctx: Context, version: int, count: int) -> None:
        async with self._turn:
            if self._trained:
                return
            began = ctx.observer.now()
            await ctx.weights.deliver_for_evaluation(version)
            tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count)
            ctx.work.notify()
            await ctx.ready.until(lambda: all(ticket.state is State.READY for ticket in tickets))
            ctx.table.close_evaluation()
            self.seconds.append(ctx.observer.now() - began)
