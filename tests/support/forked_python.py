"""Stands for a Python that has imported torch, diffusers and the trainer: `python forked_python.py ADDRESS -m name …`.

It asks the process at ADDRESS (forked.py) for a fork, which does what the rest of the command line says with this
process's environment, folder, import path and streams. It passes SIGINT and SIGTERM on, and ends as the fork ends.
"""

import atexit
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = str(Path(__file__).parents[2])
PASSED_ON = (signal.SIGINT, signal.SIGTERM)


class Streams:
    """The standard streams of the process that sends them to a fork."""

    def __getstate__(self) -> list[Any]:
        return [DupFd(number) for number in (0, 1, 2)]

    def __setstate__(self, sent: list[Any]) -> None:
        self._sent = sent

    def put(self) -> None:
        """Puts them in the place of this process's own."""
        for number, each in enumerate(self._sent):
            got = each.detach()
            os.dup2(got, number)
            os.close(got)
        sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace")  # type: ignore[misc]


def become(
    words: Sequence[str], environment: Mapping[str, str], folder: str, path: list[str], streams: Streams
) -> None:
    """Runs in the fork: what `python words…` does in `folder`."""
    os.setsid()
    streams.put()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    kind, what, *arguments = words
    try:
        if kind == "-m":
            sys.argv = [what, *arguments]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = ["-c", *arguments]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), main.__dict__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def ask(address: str, words: Sequence[str]) -> int:
    """Returns the fork's exit code; if a signal has ended it, this process ends itself by the same one.

    Raises ValueError if the words do not begin with `-m` or `-c`, with or without `-u` before it.
    """
    from tests.support.forked import CONTEXT, use

    given = words[1:] if words[:1] == ["-u"] else words
    if given[:1] not in (["-m"], ["-c"]):
        raise ValueError(f"only -m and -c are understood, not {given[:1]}")
    use(address, tracked=False)
    whole = (given, dict(os.environ), os.getcwd(), ["", *sys.path[1:]], Streams())
    process = CONTEXT.Process(target=become, args=whole)
    process.start()
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(process.pid or 0, number))
    process.join()
    code = process.exitcode or 0
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.path[0] = ROOT
    from tests.support import forked_python

    sys.modules["__main__"].__file__ = None  # Or the fork would execute this file first.
    os._exit(forked_python.ask(sys.argv[1], sys.argv[2:]))
