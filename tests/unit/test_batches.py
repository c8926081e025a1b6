"""Tests of tickets that share a batch: always the same ones, whichever worker makes them and whatever is lost."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from async_flowrl.controller.context import Tally
from async_flowrl.controller.dispatch import TicketLost
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import Fault, Timing


def shared(size: int, fault: Fault | None = None, *, workers: int = 2, timing: Timing | None = None) -> ToyRun:
    config = toy_config(1, steps=5, ticket_size=2, rollout__tickets_per_batch=size, rollout__num_workers=workers)
    return virtual(config, timing, *([fault] if fault else []))


def swapping(generate_together: Callable[..., Any], calls: list[bool]) -> Callable[..., Any]:
    """Returns the method with a swap in its first report; each call is noted in `calls`."""

    def call(requests: Any) -> Any:
        calls.append(True)
        (first, *others), *payloads = generate_together(requests)
        return [replace(first, swaps=1), *others], *payloads

    return call


def test_a_batch_is_the_next_tickets_of_a_step() -> None:
    """Eight tickets a step, so three, three and two; never some of two steps."""
    (worker,) = shared(3, workers=1).groups["rollout"].workers
    first = [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert worker.target.batches == [tuple(8 * step + k for k in batch) for step in range(5) for batch in first]


@pytest.mark.parametrize("size", [2, 3])
def test_the_weights_depend_on_the_batches_and_not_on_who_makes_them_when(size: int) -> None:
    digest = shared(size, workers=1).digest
    assert digest == shared(size, workers=3, timing=Timing(seed=1, spread=0.9, slow={"rollout-1": 3.0})).digest
    assert digest != shared(1).digest, "the company of a ticket does not matter, so nothing is tested here"


@pytest.mark.parametrize("what", ["kill", "hang", "lose-images", "lose-trajectory"])
@pytest.mark.parametrize("number", [1, 4])
def test_what_is_lost_is_made_again_in_the_same_company(what: str, number: int) -> None:
    """Also where only one ticket of a batch is lost: the others are computed beside it, and thrown away."""
    found = shared(2, lambda *call: what if call == ("rollout-0", "generate_together", number) else None)
    assert found.observer.of("injected") and found.table.retried > 0
    assert found.digest == shared(2).digest


def test_a_swap_counts_also_where_its_ticket_is_only_computed_along() -> None:
    """The first report says it for the whole batch. Group 1 is the tickets 2 and 3, of batches (0, 1, 2), (3, 4, 5)."""
    tallies, calls = list[Tally](), list[bool]()

    async def lose_one(ctx: Any, groups: Any) -> None:
        tallies.append(ctx.swaps)
        for worker in groups["rollout"].workers:
            worker.target.generate_together = swapping(worker.target.generate_together, calls)
        while True:
            if lost := [ticket for ticket in ctx.table.live() if ticket.ordinal == 2 and ticket.payload]:
                lost[0].payload[1].lost = True
                return
            await asyncio.sleep(0.01)

    config = toy_config(1, steps=5, ticket_size=2, rollout__tickets_per_batch=3, rollout__num_workers=2)
    found = virtual(config, disturb=lose_one)
    assert found.table.retried == 2
    assert tallies[0].take() == len(calls) == 5 * 3 + 2


@pytest.mark.parametrize("size", [2, 3])
def test_a_group_is_scored_once(size: int) -> None:
    """A group of two tickets, which one batch brings both of."""
    found = shared(size)
    assert sum(worker.calls["score"] for worker in found.groups["reward"].everybody) == 5 * 4


def test_no_worker_takes_a_batch_ahead_that_another_could_make_sooner() -> None:
    """Four batches a step; a worker that needs four times as long makes one of them."""
    config = toy_config(0, steps=3, prompts_per_step=8, ticket_size=2, rollout__tickets_per_batch=4)
    found = virtual(config, Timing(slow={"rollout-0": 4.0}))
    (slow, _) = found.groups["rollout"].workers
    assert len(slow.target.batches) == 3


@pytest.mark.parametrize("size", [2, 4])
def test_an_evaluation_keeps_its_share(size: int) -> None:
    """A pool that is never idle takes every fourth of its turns from it, however many tickets a batch has."""
    config = toy_config(3, steps=8, ticket_size=2, evaluate__every=2, rollout__tickets_per_batch=size)
    config.rollout.num_workers = 1
    found = virtual(config, Timing(generate=size, update=0.1))
    begun, ended = (found.tickets(state, kind="evaluation")[::2] for state in ("PENDING", "TRAINED"))
    assert len(begun) == 4
    for first, last in zip(begun, ended, strict=True):
        others = [e for e in found.tickets("RUNNING") if first["time"] < e["time"] < last["time"]]
        assert len(others) <= 8 * size


def test_a_batch_that_is_lost_again_and_again_ends_the_run() -> None:
    with pytest.raises(TicketLost, match=r"was lost 6 times; see the faults"):
        shared(2, lambda worker, method, number: "lose-images" if method == "generate_together" else None)
