"""Stand-in for torch's ProcessGroupNCCL on pretended devices: gloo carries the bytes; the behaviour is that of NCCL.

A collective is enqueued on a stream of the group's own, behind what is queued on the caller's, and completes late. The
communicator is made by the first collective or by `eager_connect_single_device`; it waits for every rank without a
time-out and hears of no abort before it exists. Two ranks on one device are refused. `Work.wait` holds back the current
stream, not the host, and raises nothing. A peer that died is waited for until an abort, or, with
PRETEND_NCCL_PEER=error, noticed as a peer on another node is. What torch's watchdog does with a collective that failed
or exceeded the time-out of its group depends on TORCH_NCCL_ASYNC_ERROR_HANDLING when the group is made, as in
ProcessGroupNCCL.hpp of torch 2.13: 0 nothing, 1 aborts the communicator and ends the process, 2 aborts, 3 (the default)
ends the process; PRETEND_NCCL_WATCHDOG=report only says so.
"""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from pretended.cuda import Event, Stream, current_stream
from pretended.host_view import host_view
from pretended.library import call
from pretended.report import COLLECTIVE, KILLED, tell

POLL_SECONDS = 0.002
WATCHDOG_SECONDS = 0.1
TEARS_DOWN, ABORTS = ("1", "3"), ("1", "2")
"""Values of TORCH_NCCL_ASYNC_ERROR_HANDLING."""
DEADLY = 5
_received = itertools.count(1)
REMOTE = "NCCL error: remote process exited or there was a network error, NCCL version 2.27.7 (pretended)"


class Options:
    """ProcessGroupNCCL.Options, with the real one's names and no others."""

    __slots__ = (
        "_timeout",
        "backend",
        "config",
        "global_ranks_in_group",
        "group_desc",
        "group_name",
        "is_high_priority_stream",
        "split_color",
        "split_from",
    )

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)


class Work(dist._Work):
    """Of one collective: enqueued, perhaps done. An error is told by the group's `get_error`, never raised."""

    def __init__(self, tensors: Sequence[Tensor], on: Stream) -> None:
        super().__init__()
        self._tensors, self._begun = list(tensors), time.monotonic()
        self._event, self.error = Event(), None
        self._event.record(on)

    error: BaseException | None

    def is_completed(self) -> bool:
        return self.error is not None or self._event.query()

    def exceeds(self, limit: timedelta) -> bool:
        return not self.is_completed() and time.monotonic() - self._begun > limit.total_seconds()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        current_stream(self._tensors[0].device).wait_event(self._event)
        return True


class ProcessGroupNCCL:
    """Broadcasts, one group beside any default group: the part of it that the checkpoint engine calls."""

    Options = Options

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        if not torch.cuda.device_count():
            raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
        self._store, self._rank, self._size = store, rank, size
        self._options = options
        self._handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
        self._inner: Any = None
        self._stream: Stream | None = None
        self._aborted = threading.Event()
        self._error = ErrorType.SUCCESS
        self._under_way: list[Work] = []
        self._kernels = ThreadPoolExecutor(1, thread_name_prefix="pretended-nccl")
        threading.Thread(target=self._watch, name="pretended-nccl-watchdog", daemon=True).start()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Makes the communicator. Waits for every rank, for ever."""
        self._connect(torch.device(device))

    def _connect(self, device: torch.device) -> None:
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        if self._inner is not None:
            return
        time.sleep(float(os.environ.get("PRETEND_NCCL_SETUP", "0")))
        refuse_shared_devices(self._store, self._rank, self._size, device)
        self._stream = Stream(device)
        store = dist.PrefixStore("gloo", self._store)
        self._inner = dist.ProcessGroupGloo(store, self._rank, self._size, timedelta(days=1))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        root = 0 if opts is None else opts.rootRank
        views, own = [host_view(tensor) for tensor in tensors], dist.BroadcastOptions()
        own.rootRank, own.rootTensor = root, 0
        return self._enqueue("broadcast", tensors, root != self._rank, lambda inner: inner.broadcast(views, own))

    def _enqueue(self, name: str, tensors: Sequence[Tensor], writes: bool, kernel: Callable[[Any], Any]) -> Work:
        device = tensors[0].device
        if device.type != "cuda" or not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("Tensors must be CUDA and dense")
        self._connect(device)
        on, inner = self._stream, self._inner
        if on is None or inner is None:
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self._rank}.")
        tell(COLLECTIVE, name)
        on.wait_stream(current_stream(device))
        for tensor in tensors:
            place = (device.index, on.stream_id, tensor.data_ptr(), tensor.nbytes)
            call("touch", f"nccl {name}".encode(), *place, int(writes))
        ticket = call("begin", device.index, on.stream_id)
        work = Work(tensors, on)
        self._under_way = [one for one in self._under_way if not one.is_completed()] + [work]
        self._kernels.submit(self._run, work, ticket, lambda: kernel(inner).wait())
        return work

    def _run(self, work: Work, ticket: object, kernel: Callable[[], object]) -> None:
        """The kernel: it ends when the bytes are there or the communicator was aborted."""
        if self._rank > 0:
            die_once()
        try:
            kernel()
        except RuntimeError:
            if os.environ.get("PRETEND_NCCL_PEER") == "error" and not self._aborted.is_set():
                work.error = dist.DistBackendError(REMOTE)
            self._aborted.wait()
        finally:
            call("end", ticket)

    def _watch(self) -> None:
        """As torch's: looks at what is under way; an exceeded time-out becomes the work's error."""
        while not self._aborted.wait(WATCHDOG_SECONDS):
            for work in list(self._under_way):
                if work.error is None and work.exceeds(self._options._timeout):
                    work.error = dist.DistBackendError(f"Watchdog caught collective operation timeout: {work._begun}")
                if work.error is None:
                    continue
                self._error = ErrorType.COMM_ERROR
                if self._handling == "0":
                    continue
                if self._handling in ABORTS:
                    self.abort()
                if self._handling in TEARS_DOWN:
                    end_process(f"rank {self._rank}: {work.error}")
                return

    def abort(self) -> None:
        """Ends kernels under way, and returns when they have ended, as ncclCommAbort does."""
        self._aborted.set()
        inner, self._inner = self._inner, None
        if inner is None or self._stream is None:
            return
        inner.abort()
        self._kernels.submit(int).result()
        call("ended", self._stream.device_index, self._stream.stream_id)

    def get_error(self) -> Any:
        """What the watchdog has seen; it sets it before it aborts."""
        return self._error


def refuse_shared_devices(store: dist.Store, rank: int, size: int, device: torch.device) -> None:
    """Tells all ranks on which of the host's GPUs this one is, and waits for them without a time-out.

    Raises DistBackendError where two are on one.
    """
    count = range(torch.cuda.device_count())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, count))).split(",")
    bus = f"{os.environ.get('NCCL_HOSTID', os.uname().nodename)}/{visible[device.index or 0]}"
    store.set(f"bus/{rank}", bus)
    found = []
    for other in range(size):
        while not store.check([f"bus/{other}"]):
            # Once the main thread has ended, Python ends this one, and aborts if it is within `check`.
            time.sleep(POLL_SECONDS if threading.main_thread().is_alive() else threading.TIMEOUT_MAX)
        found.append(store.get(f"bus/{other}").decode())
    if len(set(found)) < size:
        raise dist.DistBackendError(
            f"NCCL error: invalid usage. Duplicate GPU detected : rank {rank} and another on CUDA device {bus}"
        )


def die_once() -> None:
    """With PRETEND_NCCL_DIE=path the first receiver of all is killed in its fifth collective, and makes that file.

    (Two belong to the set-up.)
    """
    path = os.environ.get("PRETEND_NCCL_DIE")
    if path is None or next(_received) < DEADLY:
        return
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def end_process(why: str) -> None:
    """What torch's watchdog does by raising in a C++ thread: SIGABRT."""
    tell(KILLED, why)
    if os.environ.get("PRETEND_NCCL_WATCHDOG") == "report":
        return
    print(
        f"terminate called after throwing an instance of 'c10::DistBackendError' (pretended)\n  {why}", file=sys.stderr
    )
    sys.stderr.flush()
    os.abort()


def install() -> None:
    for module in (dist, c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[assignment]
    c10d._NCCL_AVAILABLE = True
