"""python keeper.py PARENT GRACE COMMAND...: runs a program, and ends it with everything it started when PARENT is gone.

The keeper is a process of its own between a worker and the program, because a worker may be killed at any instant: it
looks after its parent a few times a second. It is a session and process group of its own (whoever starts it sees to
that), the program and most of what that starts are in the group, and what left the group is found as its descendants:
orphans of the tree become children of the keeper. SIGTERM asks it to end the program in order: SIGTERM for all of it,
GRACE seconds, then SIGKILL. The exit code is the program's, 128 + n if signal n ended it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

POLL_SECONDS = 0.1
KILL_ROUNDS = 100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, grace: float, command: list[str]) -> int:
    """Returns the exit code."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True

    # Workers of Ray do not hear SIGTERM, and what they start inherits that.
    signal.signal(signal.SIGTERM, ask)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(command, preexec_fn=_die_with_the_keeper)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return 127
    while (code := _ended(program)) is None:
        if os.getppid() != parent:
            break
        if asked:
            _end_in_order(program, grace)
            break
        time.sleep(POLL_SECONDS)
    _kill_all()
    if code is None:
        code = _ended(program)
    return 128 + signal.SIGKILL if code is None else 128 - code if code < 0 else code


def _ended(program: "subprocess.Popen[bytes]") -> int | None:
    """Its exit code once it has ended, negative for a signal's; other children, which are orphans, are collected."""
    code = program.poll()
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if waited.si_pid == program.pid:
                return program.poll()
            os.waitpid(waited.si_pid, os.WNOHANG)
    return code


def _end_in_order(program: "subprocess.Popen[bytes]", grace: float) -> None:
    """SIGTERM for all; returns when the program and its children have ended, after `grace` seconds at most."""
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and (_ended(program) is None or _descendants()):
        time.sleep(POLL_SECONDS / 2)


def _kill_all() -> None:
    """SIGKILL for every descendant, until there is none: one may start another meanwhile."""
    for _ in range(KILL_ROUNDS):
        if not (found := _descendants()):
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=POLL_SECONDS)


def _descendants() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if _alive(each)]


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _die_with_the_keeper() -> None:
    """Runs in the program's process before it is the program: a keeper that is killed takes the program along."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the program is found by its group alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
