"""CPU seconds of commands that only answer: the number of the version, and what is wrong with a command line."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median

CLI = (sys.executable, "-m", "async_flowrl.cli.verbs")
ANSWERS: Mapping[str, tuple[Sequence[str], int]] = {
    "`async-flowrl --version`": ((*CLI, "--version"), 0),
    "a misspelled key after `async-flowrl train`": ((*CLI, "train", "total_stepz=3"), 2),
}
"""What is asked → the command, and its exit code."""
MOST_SECONDS = 1.0
"""Of CPU time on a quiet machine."""
TORCH = ((sys.executable, "-c", "import torch"), 0)
TORCH_SECONDS = 1.2
"""CPU seconds of TORCH on a quiet machine; a busy one takes up to four times as long for everything."""


def cpu_seconds(command: Sequence[str], code: int) -> float:
    """User and system time of a fresh process. Raises RuntimeError, with what it said, for another exit code."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr as stream:
        said = stream.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}, not {code}: {said}")
    return used.ru_utime + used.ru_stime


def answer_seconds(rounds: int) -> dict[str, float]:
    """Answer → median of its CPU seconds."""
    return {name: median(cpu_seconds(*asked) for _ in range(rounds)) for name, asked in ANSWERS.items()}
