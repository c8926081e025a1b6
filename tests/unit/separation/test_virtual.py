"""Tests of the event loop in virtual time on which other tests rely."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.virtual import Deadlock, HorizonReached, Livelock, VirtualTimeLoop, run_virtual


async def _trace() -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []

    async def worker(name: str, pause: float) -> None:
        for _ in range(3):
            await asyncio.sleep(pause)
            seen.append((name, asyncio.get_running_loop().time()))

    await asyncio.gather(worker("slow", 3600.0), worker("fast", 0.5), worker("even", 1800.0))
    return seen


def test_hours_pass_in_the_order_of_the_timers() -> None:
    before = time.monotonic()
    seen = run_virtual(_trace())
    assert time.monotonic() - before < 60, "it slept for real"
    assert [name for name, _ in seen] == ["fast", "fast", "fast", "even", "slow", "even", "even", "slow", "slow"]
    assert [at for name, at in seen if name == "slow"] == [3600.0, 7200.0, 10800.0]


def test_two_runs_are_equal() -> None:
    assert run_virtual(_trace()) == run_virtual(_trace())


def test_timeout_and_cancellation_use_the_virtual_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 100.0


def test_deadlock_is_named_with_who_waits() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(never(), name="the-stuck-one")

    with pytest.raises(Deadlock, match=r"the-stuck-one: .*never line"):
        run_virtual(main())


def test_a_heartbeat_cannot_hide_a_deadlock() -> None:
    async def main() -> None:
        async def beat() -> None:
            while True:  # noqa: ASYNC110
                await asyncio.sleep(10)

        task = asyncio.create_task(beat(), name="heart")
        await asyncio.Event().wait()
        task.cancel()

    with pytest.raises(HorizonReached, match="heart"):
        run_virtual(main(), horizon=1000)


def test_livelock_is_named() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(rounds_per_instant=99)) as runner, pytest.raises(Livelock):
        runner.run(main())


def test_executors_run_inline_and_keep_exceptions() -> None:
    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 42)

    assert run_virtual(main()) == 42


@pytest.mark.parametrize("start", [0.0, 1e5])
def test_many_equal_timers_fire_in_the_order_they_were_set(start: float) -> None:
    async def main() -> list[int]:
        await asyncio.sleep(start)
        order: list[int] = []

        async def note(index: int) -> None:
            await asyncio.sleep(1 / 3)
            order.append(index)

        jobs: list[Coroutine[Any, Any, None]] = [note(index) for index in range(50)]
        await asyncio.gather(*jobs)
        return order

    assert sorted(run_virtual(main())) == list(range(50))
    assert run_virtual(main()) == run_virtual(main())
