"""Gates in a run's own process: what it does is held up until something else has happened, so that no clock decides.

Run as `python -m tests.integration.gates`, this module is `benchmarks.disturbed` with the gate `first_ticket_last`; its
workers on Ray are forked if the environment names who does it (forked_workers.py).
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from benchmarks import disturbed
from tests.support.forked_workers import in_their_place

LIMIT = 300.0
"""Seconds after which a gate gives up, so that the run fails instead of hanging."""


@contextmanager
def first_ticket_last() -> Iterator[None]:
    """In every step, the answer with the first ticket is held up until the controller has accepted a later ticket.

    With two rollout workers, the other one makes that ticket, as it has nothing else to do.
    """
    from async_flowrl.controller import dispatch
    from async_flowrl.tickets.table import TRAIN, TicketTable

    ask, generated = dispatch.ask, TicketTable.generated
    accepted, news = {-1}, asyncio.Event()

    async def late(worker: Any, requests: Any) -> Any:
        answer, first = await ask(worker, requests), requests[0]
        if first.kind == TRAIN and first.group == first.images[0] == 0:
            async with asyncio.timeout(LIMIT):
                while max(accepted) <= first.ordinal:
                    news.clear()
                    await news.wait()
        return answer

    def noted(table: TicketTable, ticket: Any, **result: Any) -> bool:
        taken = generated(table, ticket, **result)
        if taken and ticket.kind == TRAIN:
            accepted.add(ticket.ordinal)
            news.set()
        return taken

    with mock.patch.object(dispatch, "ask", late), mock.patch.object(TicketTable, "generated", noted):
        yield


class Happened:
    """What has happened in which step, for threads that wait for it."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()
        self._changed = threading.Condition()

    def note(self, what: str, step: int) -> None:
        with self._changed:
            self._known.add((what, step))
            self._changed.notify_all()

    def wait_for(self, what: str, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (what, step) in self._known, LIMIT), f"step {step} is not {what}"


@contextmanager
def steps_recorded(first_group: int = 0) -> Iterator[Happened]:
    """A ticket is denoised when the end of the step before its own is in the records, so it takes no time of that step.

    Groups before `first_group` do not wait. "recorded" happens in every step. Workers are threads of this process.
    """
    from async_flowrl.controller.after_step import AfterStep
    from async_flowrl.rollout.diffusers_engine import DiffusersEngine
    from async_flowrl.tickets.table import TRAIN

    denoise, after_step, happened = DiffusersEngine.denoise, AfterStep.after_step, Happened()
    happened.note("recorded", -1)

    def denoising(engine: DiffusersEngine, plans: Any, images: Any) -> Any:
        request = plans[0].request
        if request.kind == TRAIN and request.group >= first_group:
            happened.note("generating", request.step)
            happened.wait_for("recorded", request.step - 1)
        return denoise(engine, plans, images)

    async def recording(steps: AfterStep, ctx: Any, step: int, stats: dict[str, float]) -> None:
        try:
            await after_step(steps, ctx, step, stats)
        finally:
            happened.note("recorded", step)

    with (
        mock.patch.object(DiffusersEngine, "denoise", denoising),
        mock.patch.object(AfterStep, "after_step", recording),
    ):
        yield happened


@contextmanager
def updates_beside_generation(steps: int, groups: int) -> Iterator[None]:
    """Each update falls into the generation of the next step's last ticket, in a run of `steps` steps.

    It begins when that ticket is being made, and the ticket waits until the end of the update's step is in the records.
    A step has `groups` groups. Workers are threads of this process.
    """
    from async_flowrl.training.trainer_worker import TrainerWorker

    train = TrainerWorker.train
    with steps_recorded(first_group=groups - 1) as happened:
        happened.note("generating", steps)

        def training(worker: TrainerWorker, request: Any, *trajectories: Any) -> Any:
            if request.begins is not None:
                happened.wait_for("generating", request.step + 1)
            return train(worker, request, *trajectories)

        with mock.patch.object(TrainerWorker, "train", training):
            yield


def main() -> int:
    """`benchmarks.disturbed` with the gate."""
    with first_ticket_last(), in_their_place():
        return disturbed.main()


if __name__ == "__main__":
    sys.exit(main())
