"""A worker's watch over Ray's head: it ends itself where nothing answers, and only there."""

import socket
import subprocess
import sys
import threading

import pytest

from separation import ray_fence
from separation.ray_fence import SHARE, keep_in_touch
from separation.ray_watch import SHARE as SHARE_OF_THE_DRIVER

SECONDS = 0.2


def test_a_worker_ends_itself_when_the_head_has_been_out_of_reach_for_long_enough() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        watch = threading.Thread(target=keep_in_touch, args=("127.0.0.1", port, SECONDS, said.append), daemon=True)
        watch.start()
        for _ in range(12):  # three times as many attempts as a silent head is given
            head.accept()[0].close()
        assert watch.is_alive() and not said
    watch.join(60)
    assert not watch.is_alive()
    assert said[0].startswith(f"Ray's head 127.0.0.1:{port} was out of reach for 0.2 s (") and len(said) == 1


def test_failures_count_from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was itself stopped for longer than the patience asks again before it gives up."""
    clock, asked, said = [0.0], [], []

    def unreachable(host: str, port: int, seconds: float) -> str | None:
        asked.append(clock[0])
        return None if len(asked) in (1, 4) else "refused"

    def sleep(seconds: float) -> None:
        clock[0] += 1000.0 if clock[0] == 0.0 else seconds

    monkeypatch.setattr(ray_fence, "unreachable", unreachable)
    monkeypatch.setattr(ray_fence.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ray_fence.time, "sleep", sleep)
    keep_in_touch("head", 1, 8.0, said.append)
    assert asked == [0.0, 1000.0, 1002.0, 1004.0, 1006.0, 1008.0, 1010.0, 1012.0, 1014.0]
    assert said == ["Ray's head head:1 was out of reach for 8 s (refused): this worker ends itself"]


def test_its_end_is_at_once_and_said_whatever_other_threads_wait_for() -> None:
    program = (
        "import threading; from separation.ray_fence import end\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "end('no head')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "no head\n")


def test_the_driver_gives_the_head_up_first() -> None:
    """So that a run without its head says that, instead of naming workers that died."""
    assert SHARE_OF_THE_DRIVER < SHARE < 1
