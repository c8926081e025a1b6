"""Tests of the driver's watch over Ray's head: an error names a head that stays silent."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from separation.head_watchdog import PATIENCE, HeadLost, patience, watch_address


def test_a_head_that_is_gone_for_long_enough_is_named() -> None:
    async def scenario() -> tuple[str, bool, float]:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        watch = asyncio.create_task(watch_address("127.0.0.1", port, 0.4))
        await asyncio.sleep(1.0)
        survived = not watch.done()
        server.close()
        await server.wait_closed()
        gone = asyncio.get_running_loop().time()
        with pytest.raises(HeadLost) as lost:
            await asyncio.wait_for(watch, 30)
        return str(lost.value), survived, asyncio.get_running_loop().time() - gone

    sentence, survived, after = asyncio.run(scenario())
    assert survived and after >= 0.2
    assert "was out of reach for 0.4 s" in sentence and "resume=auto" in sentence


def test_a_driver_that_was_stopped_itself_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own pause, longer than the patience, is no silence of the head: failures count from the first."""
    clock = 0.0

    async def connect(host: str, port: int) -> tuple[None, Mock]:
        if clock > 0:
            raise ConnectionRefusedError("refused")
        return None, Mock()

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += 100.0 if clock == 0 else seconds

    loop = SimpleNamespace(time=lambda: clock)
    pretended = SimpleNamespace(
        get_running_loop=lambda: loop, open_connection=connect, sleep=sleep, timeout=asyncio.timeout
    )
    monkeypatch.setattr("separation.head_watchdog.asyncio", pretended)
    with pytest.raises(HeadLost):
        asyncio.run(watch_address("head", 1, 10.0))
    assert clock == 110.0


def test_an_attempt_in_which_the_driver_itself_stood_still_does_not_count_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, attempts, limits = 0.0, 0, set[float]()

    async def connect(host: str, port: int) -> tuple[None, Mock]:
        nonlocal attempts, clock
        attempts += 1
        if attempts == 2:
            return None, Mock()
        clock += 100.0 if attempts == 1 else 0.0
        raise TimeoutError

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    def timeout(seconds: float) -> asyncio.Timeout:
        limits.add(seconds)
        return asyncio.timeout(None)

    loop = SimpleNamespace(time=lambda: clock)
    pretended = SimpleNamespace(get_running_loop=lambda: loop, open_connection=connect, sleep=sleep, timeout=timeout)
    monkeypatch.setattr("separation.head_watchdog.asyncio", pretended)
    with pytest.raises(HeadLost):
        asyncio.run(watch_address("head", 1, 36.0))
    assert attempts > 2 and limits == {6.0}, "short attempts: TCP repeats a lost packet ever more seldom"


def test_patience_ends_before_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATIENCE, raising=False)
    assert patience() == 36.0
    monkeypatch.setenv(PATIENCE, "20")
    assert patience() == 12.0
    monkeypatch.setenv(PATIENCE, "soon")
    assert patience() == 36.0
