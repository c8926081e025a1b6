"""Tests of a program that ends with all processes it started, whoever of them or of its parents dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from separation.program import Program

TREE = "(setsid sleep 7{0} &) ; sh -c 'trap \"\" TERM; sleep 8{0}' & sleep 9{0}"
"""An orphan in a session of its own, a child that is deaf to SIGTERM, and one that waits."""


def commands(mark: int) -> str:
    """A shell line of three processes that are told from others by what they are given: no other test has the pid."""
    return TREE.format(f"{os.getpid()}{mark}")


def tree(mark: int) -> list[psutil.Process]:
    names = {f"{digit}{os.getpid()}{mark}" for digit in (7, 8, 9)}
    return [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [""])[-1] in names]


def program(folder: Path, mark: int, grace: float = 0.3) -> Program:
    started = Program(["sh", "-c", commands(mark)], environment=dict(os.environ), log=folder / "log", grace=grace)
    wait_for(mark, 3)
    return started


def wait_for(mark: int, count: int) -> None:
    end = time.monotonic() + 120
    while len(tree(mark)) != count:
        assert time.monotonic() < end, tree(mark)
        time.sleep(0.05)


def test_stop_ends_all_of_it(tmp_path: Path) -> None:
    running = program(tmp_path, 60001)
    assert running.exit_code() is None
    running.stop()
    assert not tree(60001) and running.exit_code() in (137, 143)
    running.stop()


def test_its_end_is_the_end_of_what_it_started(tmp_path: Path) -> None:
    running = program(tmp_path, 60002)
    next(each for each in tree(60002) if each.cmdline()[-1].startswith("9")).kill()
    assert running.wait() == 137
    assert not tree(60002)


def test_a_killed_keeper_takes_the_program_and_its_group_along(tmp_path: Path) -> None:
    running = program(tmp_path, 60003)
    os.kill(running.pid, signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    wait_for(60003, 1)
    (left,) = tree(60003)  # what has left the group on purpose
    assert left.cmdline()[-1] == f"7{os.getpid()}60003"
    left.kill()


def test_a_killed_parent_takes_all_along(tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path; from separation.program import Program\n"
        f"Program(['sh', '-c', {commands(60004)!r}], environment=dict(os.environ), log=Path(sys.argv[1]), grace=9)\n"
        "time.sleep(600)"
    )
    root = str(Path(__file__).parents[3])
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], cwd=root)
    wait_for(60004, 3)
    parent.kill()
    parent.wait()
    wait_for(60004, 0)
