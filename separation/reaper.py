"""The reaper runs a program and ends it, with all processes that it started, when its own parent process is gone.

Usage: python reaper.py PARENT GRACE COMMAND..., with the pid of the parent and the seconds between SIGTERM and SIGKILL;
as the leader of a session. Its exit code is that of the program, or 128 + n if signal n ended the program. It is a
process of its own because a worker may be killed at any time; it becomes the parent of orphans of the program.
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

POLL_SECONDS = 0.1  # Interval of the checks whether the parent lives and the program runs.
KILL_SECONDS = 10.0  # Longest time for which remaining descendants are killed again and again.
# Options of Linux's prctl: a signal at the parent's death, and becoming the parent of orphaned descendants.
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, grace: float, command: list[str]) -> int:
    """Runs the command until it ends, the parent is gone, or SIGTERM arrives; returns its exit code, or 127."""
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    # Workers of Ray block SIGTERM, and the processes that they start inherit this.
    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        program = subprocess.Popen(command, preexec_fn=_die_with_the_reaper)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return 127
    while (code := _ended(program)) is None:
        if os.getppid() != parent:
            break
        if stopping:
            _end_in_order(program, grace)
            break
        time.sleep(POLL_SECONDS)
    _kill_all()
    if code is None:
        code = _ended(program)
    return 128 + signal.SIGKILL if code is None else 128 - code if code < 0 else code


def _ended(program: "subprocess.Popen[bytes]") -> int | None:
    """Returns the program's exit code (negative: ended by that signal), None while it runs; collects ended orphans."""
    code = program.poll()
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if waited.si_pid == program.pid:
                return program.poll()
            os.waitpid(waited.si_pid, os.WNOHANG)
    return code


def _end_in_order(program: "subprocess.Popen[bytes]", grace: float) -> None:
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and (_ended(program) is None or _descendants()):
        time.sleep(POLL_SECONDS / 2)


def _kill_all() -> None:
    # Until there are none, because one may start another meanwhile.
    end = time.monotonic() + KILL_SECONDS
    while (processes := _descendants()) and time.monotonic() < end:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_SECONDS / 10)  # psutil would reap the program, whose exit code `_ended` reads.


def _descendants() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if _alive(process)]


def _alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _die_with_the_reaper() -> None:
    # Runs in the program's process before exec: Linux kills the program if the reaper is killed.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":  # Elsewhere orphans are found by their process group only.
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
