"""ForkedRun is a run as a process that a test may kill; forked, it need not import torch and diffusers first."""

import os
from pathlib import Path

from tests.integration.runs import LIMIT, ROOT, TINY
from tests.support.forked import CONTEXT
from tests.support.forked_workers import NAME, in_their_place, server


def command(arguments: list[str], said: tuple[str, str], environment: dict[str, str]) -> None:
    """Runs in the process: what `python -m benchmarks.disturbed` does, and the exit code.

    What it says on stdout and stderr goes to the files `said`.
    """
    import sys

    import torch

    from benchmarks.disturbed import main

    os.chdir(ROOT)
    os.environ.clear()  # It was forked from a process with the environment of another moment.
    os.environ.update(environment)
    for stream, path in enumerate(said, start=1):
        with open(path, "w") as file:
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv = ["main", *arguments]
    with in_their_place():
        code = main()
    sys.exit(code)


class ForkedRun:
    """The process; its methods are those of `subprocess.Popen` that `wait_until` (runs.py) and tests of signals ask.

    With `backend="ray"` it starts a cluster of its own, whose workers are forked, too (forked_workers.py).
    """

    def __init__(self, folder: Path, mode: str, *overrides: str, backend: str = "local") -> None:
        self._said = [folder.with_name(f"{folder.name}.{stream}.txt") for stream in ("out", "err")]
        arguments = ["--config-name", mode, *TINY, f"runtime.backend={backend}", f"output_dir={folder}", *overrides]
        said = tuple(map(str, self._said))
        whole = dict(os.environ) | ({NAME: server()} if backend == "ray" else {})
        self._process = CONTEXT.Process(target=command, args=(arguments, said, whole), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """What it said on stdout and stderr, once it has ended. Raises TimeoutError, and kills it, if it does not."""
        self._process.join(LIMIT)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(f"it did not end within {LIMIT:g} s: {self._said[1].read_text()[-3000:]}")
        out, err = (path.read_text() for path in self._said)
        return out, err

    def said_so_far(self) -> str:
        """What it said on stderr until now."""
        return self._said[1].read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal such as `signal.SIGINT` to the process alone, since its group is that of the tests."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and the end of the process."""
        self._process.kill()
        self._process.join()
