"""Test of the CPU time of one turn of the controller's event loop with 256 rollout workers."""

import asyncio
import time
from collections.abc import Callable

import pytest

import tests.support.toy
from tests.performance.controller import AnsweringRollout
from tests.support.toy import toy_config, toy_run
from tests.support.toy_pool import Timing

WORKERS = 256
MAX_P99_SECONDS = 0.1
"""CPU time that 99 of 100 turns of the loop stay below."""


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
        1, hand_over=hand_over, steps=4, prompts_per_step=WORKERS, rollout__num_workers=WORKERS, reward__num_workers=16
    )
    costs: list[float] = []

    async def measured() -> None:
        probe = asyncio.create_task(turns(costs))
        found = await toy_run(config, timing)
        probe.cancel()
        assert len(found.observer.of("version", state="acknowledged")) == WORKERS * 5
        assert len(found.lines) == 4

    asyncio.run(measured())
    ordered = sorted(costs)
    p99 = ordered[int(0.99 * len(ordered))]
    record_property("milliseconds of CPU per turn: p99, longest", (p99 * 1e3, ordered[-1] * 1e3))
    assert p99 < MAX_P99_SECONDS, (
        f"{len(costs)} turns: p99 {p99 * 1e3:.1f} ms, longest {ordered[-1] * 1e3:.1f} ms of CPU"
    )
