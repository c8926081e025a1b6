"""Commands and processes of pretended nodes."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

COMMAND_SECONDS = 60.0


def run(command: Sequence[str]) -> None:
    """Runs a command. Raises RuntimeError, with its error output, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def title(process: psutil.Process) -> str:
    """Returns the last path component of the program, or the whole title if the process sets one, as Ray workers do."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return ""
    return Path(words[0]).name if words and words[0].startswith("/") else " ".join(words)


def end_tree(process: "subprocess.Popen[str]") -> None:
    """Kills a program and all processes that it has started."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait(COMMAND_SECONDS)
