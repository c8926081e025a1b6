"""Orderly stop of a run: SIGTERM, Ctrl-C or `time_limit` ends it after the current step, with a checkpoint."""

import asyncio
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from async_flowrl.config import exit_codes
from async_flowrl.observability.terminal import say

ASKED = "async_flowrl: Ctrl-C ends the run after this step, with a checkpoint; Ctrl-C again ends it at once\n"


class StopRequest:
    """Request to end the run, true when called if there is one; `reason` names the source, `code` is the exit code."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.code = exit_codes.RESUMABLE

    def __call__(self) -> bool:
        return self.reason is not None

    def ask(self, reason: str, code: int = exit_codes.RESUMABLE) -> None:
        if self.reason is None:
            self.reason, self.code = reason, code


@contextmanager
def time_limited(stop: StopRequest, time_limit: float | None) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    timer = loop.call_later(time_limit, stop.ask, f"time_limit={time_limit:g} s") if time_limit is not None else None
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


@contextmanager
def sigterm_asks(stop: StopRequest) -> Iterator[None]:
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, stop.ask, "SIGTERM")
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def ctrl_c_asks(stop: StopRequest) -> Iterator[None]:
    """Context in which the first Ctrl-C asks `stop`; one after a request ends the run at once."""
    loop, at_once = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(at_once):
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop():
            at_once(number, frame)
        else:
            stop.ask("Ctrl-C", exit_codes.INTERRUPTED)
            loop.call_soon_threadsafe(say, ASKED, sys.stderr)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, at_once)


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit in the main thread, with the exit code RESUMABLE."""
    # So what was started is ended, and whoever started the run may start it again. While a run trains (`sigterm_asks`),
    # that has precedence. Does nothing in another thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # What is ended must not be interrupted.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of one that had not begun
        say("async_flowrl: ended by SIGTERM before the first step\n", sys.stderr)
        raise SystemExit(exit_codes.RESUMABLE)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
