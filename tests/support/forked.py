"""CONTEXT starts processes that have imported torch, diffusers and the trainer already, which takes seconds each time.

They are forked by a process that imports these once, has no threads and loads no model (multiprocessing's forkserver).
With several test processes (`-n`) it is the same one for all of them: conftest.py has it started by the process that
hands out the tests, and tells the others where it listens. `python` is the same for command lines.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

METHOD = "forkserver"
CONTEXT = multiprocessing.get_context(METHOD)
PRELOADED = [
    "pytest",
    "hypothesis",
    "fastapi",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "diffusers.pipelines.qwenimage.pipeline_qwenimage",
    "peft",
    "async_flowrl.training.trainer_worker",
    "async_flowrl.rollout.rollout_worker",
    "async_flowrl.run.job",
    "async_flowrl.policies.qwen_image",
    "tests.support.trainer_rig",
    "tests.support.forked_python",
    "tests.support.frozen",
]
CONTEXT.set_forkserver_preload(PRELOADED)
"""The list is global to the process. A module that needs another list sets it when it starts its first process, and not
when it is imported, or it overwrites this one. Where the forking process is shared, this list alone counts."""
SHAREABLE = sys.version_info < (3, 14)
"""Later versions of Python let only the process that has started a forkserver ask it for a fork."""
TESTS: Any = forkserver.ForkServer()
"""Another such process, from which the test processes are forked, with all tests imported: what they compare with forks
of the first one has hashed in another order."""
TESTS.set_forkserver_preload([*PRELOADED, "tests.support.collected"])
ARGUMENTS = "TESTS_TO_COLLECT"
"""Environment variable with the files and folders of the tests to import, a JSON list."""
PROGRAM = Path(__file__).with_name("forked_python.py")


def imported(said: Connection) -> None:
    """Sends which of PRELOADED a forked process has imported when it begins."""
    said.send([name for name in PRELOADED if name in sys.modules])


def share(server: Any = None) -> str | None:
    """Returns where the process listens from which all are forked; starts it if there is none, which takes a moment.

    None with a version of Python with which it cannot be shared.
    """
    if not SHAREABLE:
        return None
    server = server or forkserver._forkserver  # type: ignore[attr-defined]
    with open(os.devnull, "w") as nothing:  # What forked processes print is not mixed with what pytest prints.
        said = os.dup(1)
        os.dup2(nothing.fileno(), 1)
        try:
            server.ensure_running()
        finally:
            os.dup2(said, 1)
            os.close(said)
    return str(server._forkserver_address)


def use(address: str, *, tracked: bool = True) -> None:
    """Has the processes that this one starts with CONTEXT forked by the process that listens at `address`.

    That one ends with the process that has started it. Without `tracked`, no process of multiprocessing is started that
    would remove what forked processes leave in shared memory.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server._forkserver_alive_fd = nothing = os.open(os.devnull, os.O_RDWR)
    server.ensure_running = resource_tracker.ensure_running if tracked else int
    if not tracked:
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd, tracker.ensure_running = nothing, int


def python(server: Any = None) -> list[str]:
    """Returns the beginning of a command line in place of `sys.executable`; `-m module` or `-c code` must follow.

    The command is what a fresh Python would be, with its arguments, environment, folder and streams, but that it is
    forked, and has a session of its own. SIGINT and SIGTERM are passed on to it; SIGKILL does not reach it. Not for
    tests of imports, of the start, or of what is read from the environment while modules are imported.
    """
    address = share(server)
    return [sys.executable] if address is None else [sys.executable, str(PROGRAM), address]
