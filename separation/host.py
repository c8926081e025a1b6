"""The inside of a worker, an actor of Ray or a thread: builds one object and runs its methods.

Nothing heavy is imported here: thread counts have to be in force before torch or numpy start their pools.
"""

import faulthandler
import importlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from separation.group import VISIBLE_DEVICES
from separation.imports import without_collections
from separation.processes import identity

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names under which torch reads its allocator's settings; the first one is today's."""


class RemoteError(Exception):
    """What a method raised, as text: any exception can travel that way, also one that can't be pickled."""

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(kind, message, remote_traceback)
        self.kind, self.message, self.remote_traceback = kind, message, remote_traceback

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


def resolve(path: str) -> Any:
    """The object named `pkg.module:attr`. Raises ValueError, ModuleNotFoundError or AttributeError."""
    module, _, attribute = path.partition(":")
    if not (module and attribute):
        raise ValueError(f"{path!r} is not of the form pkg.module:attr")
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


class Host:
    """Holds the object of one worker and forwards calls to it."""

    def __init__(self, name: str, *, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._target: Any = None

    def build(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Imports the factory and calls it."""
        try:
            limit_threads(self.threads)
            with without_collections():
                make = resolve(factory)
            limited = limit_threads(self.threads)
            self._target = make(**arguments)
            if not limited:
                limit_threads(self.threads)
        except Exception as error:
            raise RemoteError.of(error) from None

    def run(self, method: str, *args: Any) -> Any:
        """The result of a method (of a part: `receiver.receive`) or of `pkg.module:function`. Raises RemoteError."""
        try:
            return self._find(method)(*args)
        except Exception as error:
            raise RemoteError.of(error) from None

    def run_split(self, method: str, returns: int, *args: Any) -> tuple[Any, ...]:
        """Like `run` for a method that must return a tuple of `returns` items."""
        result = self.run(method, *args)
        if not isinstance(result, tuple) or len(result) != returns:
            got = f"{len(result)} items" if isinstance(result, tuple) else type(result).__name__
            error = TypeError(f"{method} must return a tuple of {returns} items, got {got}")
            raise RemoteError.of(error)
        return result

    def _find(self, method: str) -> Callable[..., Any]:
        method_or_function: Callable[..., Any] = resolve(method) if ":" in method else attrgetter(method)(self._target)
        return method_or_function


@dataclass(frozen=True)
class Surroundings:
    """What a worker's process finds in its environment, besides its threads."""

    environment: Mapping[str, str]
    owns_gpu: bool
    allocator: str = ""
    """Settings of torch's memory allocator, where the environment says none; empty leaves it alone."""

    def variables(self) -> dict[str, str]:
        """What is set whatever was there. Which devices the owner of a GPU sees, Ray has said by then.

        The owner of none must see none, which Ray alone does not see to: its newer versions show it every GPU.
        """
        hidden = {} if self.owns_gpu else {VISIBLE_DEVICES: ""}
        return {**self.environment, **hidden}


class ProcessHost(Host):
    """A Host that has a process of its own."""

    def __init__(self, name: str, *, threads: int, surroundings: Surroundings, log_file: str | None) -> None:
        os.environ.update({**thread_environment(threads), **surroundings.variables()})
        if surroundings.allocator and not any(name in os.environ for name in ALLOCATOR_NAMES):
            os.environ[ALLOCATOR_NAMES[0]] = surroundings.allocator
        super().__init__(name, threads=threads)
        if log_file is not None:
            redirect_output(Path(log_file))

    def watch(self) -> None:
        """Never returns: the pending call fails when the process ends, whatever else it was doing."""
        threading.Event().wait()

    def identity(self) -> tuple[int, float, str]:
        """Who this process is, for `processes.process_of`."""
        return identity()


def limit_threads(count: int) -> bool:
    """Sets torch's threads and returns True if torch is there already.

    Before that the environment decides, of which torch takes no more threads than the machine has cores.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    return torch is not None


def thread_environment(count: int) -> dict[str, str]:
    """Environment of a process whose numeric libraries use `count` threads, whatever Ray thinks of its CPUs."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(count))


def redirect_output(path: Path) -> None:
    """Appends this process's stdout, stderr, log records and crash dumps to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger(__name__).info("process %d on %s", os.getpid(), socket.gethostname())
