"""Test of the CPU time of one turn of the controller's event loop with 256 rollout workers."""

import asyncio
import time
from collections.abc import Callable

import pytest

import tests.support.toy
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from benchmarks.controller import MODES, AnsweringRollout, measure
from tests.support.toy import toy_config, toy_run, virtual
from tests.support.toy_pool import Timing

WORKERS, STEPS = 256, 3
MAX_P99_SECONDS = 0.1
"""CPU time that 99 of 100 turns of the loop stay below. It is this thread's, so other processes' time is not in it, and
twenty times what was measured, for a machine that computes slowly."""


async def turns(costs: list[float]) -> None:
    """CPU seconds of this thread from one turn of the loop to the next."""
    before = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        costs.append(now - before)
        before = now


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
def test_a_turn_of_the_loop_is_short_with_256_workers(
    hand_over: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """`pytest --junitxml` records the figures."""
    monkeypatch.setattr(tests.support.toy, "ToyRollout", lambda *arguments, **options: AnsweringRollout())
    timing = Timing(generate=0.1, score=0.0, update=0.0, transfer=0.0)
    config = toy_config(
        1,
        hand_over=hand_over,
        steps=STEPS,
        prompts_per_step=WORKERS,
        rollout__num_workers=WORKERS,
        reward__num_workers=16,
    )
    costs: list[float] = []

    async def measured() -> None:
        probe = asyncio.create_task(turns(costs))
        found = await toy_run(config, timing)
        probe.cancel()
        assert len(found.observer.of("version", state="acknowledged")) == WORKERS * (STEPS + 1)
        assert len(found.lines) == STEPS

    asyncio.run(measured())
    ordered = sorted(costs)
    p99 = ordered[int(0.99 * len(ordered))]
    record_property("milliseconds of CPU per turn: p99, longest", (p99 * 1e3, ordered[-1] * 1e3))
    assert p99 < MAX_P99_SECONDS, (
        f"{len(costs)} turns: p99 {p99 * 1e3:.1f} ms, longest {ordered[-1] * 1e3:.1f} ms of CPU"
    )


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("groups", [16, 64])
def test_calls_of_trainer_ranks_do_not_grow_with_groups_times_ranks(hand_over: str, groups: int) -> None:
    """A step ends with two calls of each rank. Of a batch a call has up to eight groups; of a stream, those that are
    ready, so there are never more calls than groups."""
    steps, ranks = 3, 4
    config = toy_config(1, hand_over=hand_over, steps=steps, prompts_per_step=groups, trainer__num_workers=ranks)
    found = virtual(config, Timing(generate=0.01, update=1.0))
    counts = [worker.calls for worker in found.groups["trainer"].workers]
    assert all(each["add_up"] == each["take_step"] == steps for each in counts)
    of_a_rank = -(-groups // (ranks * MAX_GROUPS_PER_CALL)) + 1
    most = steps * (ranks * of_a_rank if hand_over == "batch" else groups - 1)
    assert sum(each["train"] for each in counts) <= most


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode[1])
def test_tickets_stay_cheap_with_64_trainer_ranks(mode: tuple[int, str]) -> None:
    """2 ms of CPU are the aim, 1.1 and 1.6 were measured; the limit leaves room for a machine that computes slowly."""
    assert measure(64, *mode, ranks=64).cpu_per_ticket < 0.02
