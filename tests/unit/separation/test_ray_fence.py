"""Tests of a worker's watch over Ray's head: it ends itself if, and only if, the head is silent for long enough."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest

from separation import head_watchdog
from separation.head_watchdog import (
    DRIVER_SHARE_OF_PATIENCE,
    FENCE_SHARE_OF_PATIENCE,
    HeadLost,
    keep_in_touch,
    watch_address,
)
from separation.processes import kill_remaining

SECONDS = 0.2


def test_a_worker_ends_itself_when_the_head_has_been_out_of_reach_for_long_enough() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        watch = threading.Thread(target=lambda: said.append(keep_in_touch("127.0.0.1", port, SECONDS)), daemon=True)
        watch.start()
        for _ in range(12):  # three times as many attempts as a silent head is given
            head.accept()[0].close()
        assert watch.is_alive() and not said
    watch.join(60)
    assert not watch.is_alive()
    assert said[0].startswith(f"Ray's head 127.0.0.1:{port} was out of reach for 0.2 s (") and len(said) == 1


def test_failures_count_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was itself stopped for longer than the patience asks again before it gives up."""
    clock, asked = [0.0], list[float]()

    def unreachable(host: str, port: int, seconds: float) -> str | None:
        asked.append(clock[0])
        return None if len(asked) in (1, 4) else "refused"

    def sleep(seconds: float) -> None:
        clock[0] += 1000.0 if clock[0] == 0.0 else seconds

    monkeypatch.setattr(head_watchdog, "unreachable", unreachable)
    monkeypatch.setattr(head_watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    said = keep_in_touch("head", 1, 32.0)
    assert asked == [0.0, *range(1000, 1039, 2)]
    assert said == "Ray's head head:1 was out of reach for 32 s (refused)"


def test_a_silent_head_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long attempt would be answered late, if at all, when a cable is put back; one that took long because the
    process was stopped meanwhile does not count alone."""
    clock, limits = [0.0], list[float]()

    def unreachable(host: str, port: int, seconds: float) -> str | None:
        limits.append(seconds)
        clock[0] += 1000.0 if len(limits) == 1 else seconds
        return None if len(limits) == 2 else "timed out"

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(head_watchdog, "unreachable", unreachable)
    monkeypatch.setattr(head_watchdog, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    keep_in_touch("head", 1, 48.0)
    assert set(limits) == {6.0} and len(limits) == 2 + 6


def test_it_ends_at_once_and_with_what_it_started_though_its_log_takes_nothing_more_and_a_thread_waits() -> None:
    program = (
        "import subprocess, sys, threading; from separation.head_watchdog import end\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "end('no head')"
    )
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(65536))
    os.set_blocking(writer, True)
    with open(writer, "w") as stuck, open(reader):
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stuck, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    with suppress(psutil.NoSuchProcess):
        assert not kill_remaining([psutil.Process(int(done.stdout))], grace=60.0)


def test_the_driver_gives_the_head_up_first() -> None:
    """So that a run without its head says that, instead of naming workers that died."""
    assert DRIVER_SHARE_OF_PATIENCE < FENCE_SHARE_OF_PATIENCE < 1


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
