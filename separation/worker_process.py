"""The inside of a worker: a Host builds one object and runs its methods; a ProcessHost does so in a Ray actor.

This module must not import torch or numpy, because their numbers of threads must be set before they are imported.
"""

import asyncio
import faulthandler
import importlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from separation.group import Unusable, WorkerDied, WorkerFailed

log = logging.getLogger(__name__)

# Environment variables from which torch reads settings of its memory allocator; the first is the current name.
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class RemoteError(Exception):
    """The text of an exception in a worker, so that it reaches the caller even if the exception cannot be pickled."""

    def __init__(self, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(kind, message, remote_traceback)
        self.kind, self.message, self.remote_traceback = kind, message, remote_traceback

    @classmethod
    def of(cls, error: BaseException) -> "RemoteError":
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))

    def failure(self, worker: str, method: str) -> WorkerFailed | WorkerDied:
        """Returns what the caller of the worker's method gets."""
        if self.kind == Unusable.__name__:
            died = WorkerDied(worker, self.message)
            died.add_note(f"in the worker:\n{self.remote_traceback}")
            return died
        return WorkerFailed(worker, method, self.kind, self.message, self.remote_traceback)


def resolve(path: str) -> Any:
    """Returns the object named `pkg.module:attr`. Raises ValueError, ModuleNotFoundError or AttributeError."""
    module, _, attribute = path.partition(":")
    if not (module and attribute):
        raise ValueError(f"{path!r} is not of the form pkg.module:attr")
    target: Any = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    return target


class Host:
    def __init__(self, name: str, *, threads: int) -> None:
        self.name = name
        self.threads = threads
        self._target: Any = None

    def build(self, factory: str, arguments: Mapping[str, Any]) -> None:
        """Imports the factory (`pkg.module:attr`) and calls it with `arguments`. Raises RemoteError."""
        # torch's threads are limited as soon as torch is there: before, by the import of the factory, or by its call.
        try:
            limit_threads(self.threads)
            make = resolve(factory)
            limit_threads(self.threads)
            self._target = make(**arguments)
            limit_threads(self.threads)
        except Exception as error:
            raise RemoteError.of(error) from None

    def run(self, method: str, *args: Any) -> Any:
        """Returns the result of `method`, `attribute.method` or `pkg.module:function`. Raises RemoteError."""
        try:
            function = resolve(method) if ":" in method else attrgetter(method)(self._target)
            return function(*args)
        except Exception as error:
            raise RemoteError.of(error) from None

    def run_split(self, method: str, returns: int, *args: Any) -> tuple[Any, ...]:
        """Runs a method whose result is a tuple of `returns` items, for Ray an object each. Raises RemoteError."""
        result = self.run(method, *args)
        if not isinstance(result, tuple) or len(result) != returns:
            got = f"{len(result)} items" if isinstance(result, tuple) else type(result).__name__
            error = TypeError(f"{method} must return a tuple of {returns} items, got {got}")
            raise RemoteError.of(error)
        return result


class ProcessHost(Host):
    """A Host in a process of its own, with its output in `log_file`; `expandable_segments` as in PoolSpec."""

    def __init__(
        self,
        name: str,
        *,
        threads: int,
        environment: Mapping[str, str],
        expandable_segments: bool,
        log_file: str | None,
    ) -> None:
        os.environ.update({**thread_environment(threads), **environment})
        self._probes = expandable_segments and not any(name in os.environ for name in ALLOCATOR_NAMES)
        if self._probes:
            os.environ[ALLOCATOR_NAMES[0]] = "expandable_segments:True"
        super().__init__(name, threads=threads)
        if log_file is not None:
            redirect_output(Path(log_file))

    def build(self, factory: str, arguments: Mapping[str, Any]) -> None:
        if self._probes:
            probe_expandable_segments()
        super().build(factory, arguments)

    def watch(self) -> None:
        """Never returns, so that the caller learns of this process's end: its pending call of `watch` then fails."""
        threading.Event().wait()


def probe_expandable_segments() -> None:
    """Turns expandable segments off in this process if its driver cannot map memory, as some under WSL and on vGPUs."""
    import torch

    if not torch.cuda.is_available():
        return
    try:
        torch.empty(1, device="cuda")
    except torch.OutOfMemoryError:
        pass  # The driver can; the worker will say what has no room.
    except RuntimeError as error:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        log.warning("segments of GPU memory do not grow here, so more is lost to gaps; an allocation failed: %s", error)


def limit_threads(count: int) -> None:
    # When torch is imported it takes its number of threads from `thread_environment`, but no more than the machine has
    # cores. This call is needed for more.
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)


def thread_environment(count: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return dict.fromkeys(names, str(count))


def redirect_output(path: Path) -> None:
    """Appends this process's stdout, stderr, log records and crash dumps to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="replace")  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger(__name__).info("process %d on %s", os.getpid(), socket.gethostname())


T = TypeVar("T")


class CallTable:
    """The unanswered calls of one worker. After `declare_dead`, each of them and each later call raises WorkerDied."""

    # Late answers of a dead worker are discarded, because it may already have been replaced.

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.reason: str | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()

    def check(self) -> None:
        if self.reason is not None:
            raise WorkerDied(self.worker, self.reason)

    def open(self) -> "asyncio.Future[Any]":
        """Returns a future for the answer of a new call. Raises WorkerDied if the worker is dead."""
        self.check()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def declare_dead(self, reason: str) -> None:
        """Ends every open call with WorkerDied. Only the first call has an effect; its reason is kept."""
        if self.reason is not None:
            return
        self.reason = reason
        log.info("%s died: %s", self.worker, reason)
        for future in list(self._waiting):
            settle(future, error=WorkerDied(self.worker, reason))

    async def watch(self) -> NoReturn:
        await self.open()
        raise AssertionError("unreachable: nobody answers this call")


def settle(future: "asyncio.Future[Any]", *, value: Any = None, error: BaseException | None = None) -> None:
    """Answers a call with a value or an error, unless the call was answered, cancelled or ended by a death before."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def pick_lane(lanes: Mapping[str, T], lane: str, worker: str) -> T:
    """Returns the worker's lane named `lane`. Raises ValueError, which names the existing lanes."""
    if lane not in lanes:
        raise ValueError(f"{worker} has no lane {lane!r}; it has {', '.join(lanes)}")
    return lanes[lane]
