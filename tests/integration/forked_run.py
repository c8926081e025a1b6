"""ForkedRun is a run as a process that a test may kill; forked, it need not import torch and diffusers first."""

import os
from pathlib import Path

from tests.integration.runs import LIMIT, ROOT, TINY
from tests.support.forked import CONTEXT


def command(arguments: list[str], log: str) -> None:
    """Runs in the process: what `python -m async_flowrl.main` does, and the exit code; what it says goes to `log`."""
    import sys

    import torch

    from async_flowrl.main import main

    os.chdir(ROOT)
    with open(log, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv = ["main", *arguments]
    sys.exit(main())


class ForkedRun:
    """The process; its methods are those of `subprocess.Popen` that `wait_until` (runs.py) and tests of signals ask."""

    def __init__(self, folder: Path, mode: str, *overrides: str) -> None:
        self._log = folder.with_name(f"{folder.name}.txt")
        arguments = ["--config-name", mode, *TINY, "runtime.backend=local", f"output_dir={folder}", *overrides]
        self._process = CONTEXT.Process(target=command, args=(arguments, str(self._log)), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """What it said, once it has ended. Raises TimeoutError, and kills it, if it does not end."""
        self._process.join(LIMIT)
        if self.poll() is None:
            self.kill()
            raise TimeoutError(f"it did not end within {LIMIT:g} s: {self._log.read_text()[-3000:]}")
        return "", self._log.read_text()

    def send_signal(self, number: int) -> None:
        """Sends a signal such as `signal.SIGINT` to the process alone, since its group is that of the tests."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and the end of the process."""
        self._process.kill()
        self._process.join()
