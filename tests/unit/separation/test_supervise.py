"""Tests of supervision, deadlines and retries, in virtual time."""

import asyncio
import pickle
from contextlib import suppress

import pytest

from separation.supervise import DeadlineExceeded, deadline, supervised


class Boom(Exception):
    """What the tests raise."""


async def fail_after(seconds: float, text: str) -> None:
    await asyncio.sleep(seconds)
    raise Boom(text)


async def tick(log: list[str], name: str, closing: float = 0.0) -> None:
    """Waits for ever; on cancellation takes `closing` seconds to end."""
    try:
        await asyncio.Event().wait()
    finally:
        log.append(f"{name} told")
        await asyncio.sleep(closing)
        log.append(f"{name} ended")


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_background_failure_cancels_the_body_and_is_raised_as_itself() -> None:
    with pytest.raises(Boom, match="first") as caught:
        async with supervised(fail_after(5, "first")):
            await asyncio.sleep(1000)
    names = [entry.name for entry in caught.traceback]
    assert names[-1] == "fail_after", "the traceback must end where it was raised"
    assert caught.value.__context__ is None
    assert any("fail_after" in note for note in caught.value.__notes__)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    assert now() == 5


async def test_the_body_ends_the_tasks_last_started_first() -> None:
    log: list[str] = []
    async with supervised(tick(log, "a", 1), tick(log, "b", 2)):
        await asyncio.sleep(3)
    assert now() == 6
    assert log == ["b told", "b ended", "a told", "a ended"]


async def test_a_failure_of_the_body_is_first_and_later_ones_are_notes() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise Boom("while closing")

    with pytest.raises(Boom, match="body") as caught:
        async with supervised(stubborn()):
            await fail_after(1, "body")
    assert any("while closing" in note for note in caught.value.__notes__)


async def test_a_body_that_swallows_the_cancellation_still_ends_with_the_failure() -> None:
    async def swallow() -> None:
        async with supervised(fail_after(1, "cause")):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(100)
            await asyncio.sleep(3)

    with pytest.raises(Boom, match="cause"):
        await swallow()
    await asyncio.sleep(1)
    assert now() == 5


async def test_a_failure_in_the_instant_the_body_ends_is_not_lost() -> None:
    async def body() -> None:
        async with supervised(fail_after(1, "late")):
            await asyncio.sleep(0.5)
            await asyncio.sleep(0.5)

    with pytest.raises(Boom, match="late"):
        await body()


async def test_cancellation_from_outside_passes_after_everything_is_closed() -> None:
    log: list[str] = []

    async def body() -> None:
        async with supervised(tick(log, "a", 1)):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled() and log[0] == "a told"


async def test_deadline_names_what_was_late_and_asks_for_a_report() -> None:
    with pytest.raises(DeadlineExceeded, match=r"publish of version 3 .* 30 s") as caught:
        async with deadline(30, "publish of version 3", report=lambda: "rollout-1 waits"):
            await asyncio.Event().wait()
    assert caught.value.__notes__ == ["rollout-1 waits"]
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.what, copy.seconds) == ("publish of version 3", 30)
    assert now() == 30
