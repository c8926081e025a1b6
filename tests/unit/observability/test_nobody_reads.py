"""Tests of a stdout or stderr that nobody reads: a run goes on, e.g. if `tee` died of Ctrl-C; `--help | head` ends."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
from pathlib import Path
from async_flowrl.observability.terminal import say

stream = getattr(sys, sys.argv[1])
logging.basicConfig(filename=sys.argv[2], level=logging.WARNING)
sys.stdin.readline()
for n in range(3):
    say(f"line {n}\\n", stream)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_nobody_reads_is_dropped_and_said_once(name: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if name == "stdout" else None,
        stderr=subprocess.PIPE if name == "stderr" else None,
        text=True,
    )
    reader = process.stdout if name == "stdout" else process.stderr
    assert reader is not None and process.stdin is not None
    reader.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.wait(120) == 0
    said = log.read_text()
    assert said.count(f"nobody reads <{name}> any more") == 1


START = "from async_flowrl.observability.terminal import run_program; "


@pytest.mark.parametrize("letters", [2, 200_000])
def test_what_only_prints_ends_without_a_traceback(letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = f"import time; {START} time.sleep(1); run_program(lambda: print('x' * {letters}) or 0)"
    command = f"{sys.executable} -c {shlex.quote(program)} | true"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_a_broken_pipe_of_a_socket_is_loud() -> None:
    program = f"import os, socket; {START} a, b = socket.socketpair(); b.close(); run_program(lambda: a.send(b'x'))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "BrokenPipeError" in ended.stderr
