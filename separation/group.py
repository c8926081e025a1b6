"""Pools of workers behind one interface, whether they are Ray actors or threads of this process.

A worker hosts one plain object built from a factory named `pkg.module:attr`; `call` runs one of its methods.
Calls on one lane run one at a time, in order; different lanes run side by side (a delivery while images are made).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class WorkerDied(RuntimeError):
    """The worker's process is gone; `worker` names it."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"{worker} died: {reason}")
        self.worker, self.reason = worker, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.reason)


class WorkerFailed(RuntimeError):
    """A method raised inside the worker. `kind` is the exception's class name, `remote_traceback` its text there."""

    def __init__(self, worker: str, method: str, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{worker}.{method} raised {kind}: {message}")
        self.worker, self.method, self.kind, self.message = worker, method, kind, message
        self.remote_traceback = remote_traceback
        self.add_note(f"in the worker:\n{remote_traceback}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.method, self.kind, self.message, self.remote_traceback)


class RefLost(RuntimeError):
    """The value behind a ref is gone: the node that held it died, or it was freed."""


class NoSeat(RuntimeError):
    """A worker of a pool that grows and shrinks is gone, and no node has a seat for its successor now."""


class Ref(Protocol):
    """A result that stayed where it is; pass it as an argument of another call, or `fetch` it. Opaque."""


@dataclass(frozen=True)
class PoolSpec:
    """What a pool needs. `arguments` are the factory's keyword arguments; the worker's `index` and `name` are added."""

    name: str
    factory: str
    num_workers: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    gpus_per_worker: float = 0.0
    cpus_per_worker: float = 1.0
    threads: int = 1
    """torch threads, set in the worker before anything is imported."""
    lanes: Sequence[str] = ()
    """Extra lanes beside "main", each with one thread."""
    gang: bool = False
    """The workers live and die together (ranks of one process group): reserved first, and as one placement group."""
    same_code: Sequence[str] = ()
    """Packages whose code must be the same on every node of a cluster that has several (Ray only)."""
    workers_per_node: int | None = None
    """So many workers on each of num_workers / workers_per_node nodes, which all differ; None: wherever there is room,
    a gang on as few nodes as can be."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set in every worker that is a process, before its factory is imported."""
    allocator: str = ""
    """Settings of torch's memory allocator in workers that own a GPU, where their environment says none."""
    min_workers: int | None = None
    """The pool starts as soon as so many have seats; None: num_workers."""
    max_workers: int | None = None
    """The pool grows to so many while there are seats; None: num_workers. With both None its size is fixed."""

    @property
    def elastic(self) -> bool:
        """Whether workers may join and leave."""
        return self.min_workers is not None or self.max_workers is not None

    @property
    def least(self) -> int:
        return self.num_workers if self.min_workers is None else self.min_workers

    @property
    def most(self) -> int:
        return self.num_workers if self.max_workers is None else self.max_workers

    @property
    def size(self) -> str:
        """`8`, or `8 (2 to 16)` of a pool whose size may change."""
        return f"{self.num_workers} ({self.least} to {self.most})" if self.elastic else f"{self.num_workers}"

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.num_workers % self.workers_per_node:
            raise ValueError(
                f"workers_per_node={self.workers_per_node} of the pool {self.name} must divide its "
                f"{self.num_workers} workers"
            )
        if VISIBLE_DEVICES in self.environment:
            raise ValueError(f"{VISIBLE_DEVICES} of the pool {self.name} follows from its seats and can't be set")


class Worker(Protocol):
    """One worker. `name` is "<pool>-<index>", or "<pool>-<index>.<incarnation>" after a replacement."""

    name: str
    pool: str
    index: int
    pid: int
    node: str

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        """The method's result. Refs among the arguments (top level only) arrive as their values.

        `method` may also be `pkg.module:function`: that function, run in the worker.
        Raises WorkerDied, WorkerFailed or RefLost. Cancelling the await does not stop the method, only forgets it.
        """
        ...

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        """For a method that returns a tuple of `returns` items: the first by value, the others as refs."""
        ...

    async def watch(self) -> NoReturn:
        """Waits until the worker dies and raises WorkerDied, also while no call is under way."""
        ...

    def kill(self) -> None:
        """SIGKILL, now (Ray); calls under way raise WorkerDied, and what they still return is discarded."""
        ...


@dataclass(frozen=True)
class Departure:
    """A worker whose node is to end, in `seconds` from now; infinity where nobody said when."""

    worker: Worker
    seconds: float


class Growth(Protocol):
    """How a pool grows and shrinks. Which of its workers serve is the business of whoever asks it."""

    async def seat(self) -> Any:
        """Waits for a seat for one more worker, at most `max_workers`; whoever gets it fills it or gives it back."""
        ...

    async def fill(self, seat: Any) -> Worker:
        """The seat's worker, built, and in the pool; several may be built side by side. Raises what building a worker
        raises; the seat is still taken then. Cancelled, it leaves no worker behind."""
        ...

    async def give_back(self, seat: Any) -> None:
        """Gives back a seat that nobody sits in."""
        ...

    async def departures(self, known: Collection[str]) -> Sequence[Departure]:
        """Waits until nodes are drained on which workers sit that are not `known` by name; returns those."""
        ...

    async def release(self, index: int) -> None:
        """Kills the worker, takes it out of the pool and gives its seat back. Releasing twice is fine."""
        ...


class WorkerGroup(Protocol):
    """The workers of one pool. Replacing a worker kills the old one first and builds the new one in the same place."""

    spec: PoolSpec
    workers: list[Worker]
    """In the order of their indices; those of a pool with `growth` may have gaps between them."""
    growth: Growth | None
    """None where the pool's size is fixed."""

    async def replace(self, index: int) -> Worker:
        """Kills worker `index`, waits until it is gone, and returns its successor, built and ready.

        Where the pool has `growth`, the successor takes any seat that is free. Raises NoSeat where there is none,
        WorkerDied or WorkerFailed if the successor can't be built, DeadlineExceeded if that takes too long.
        """
        ...

    async def fetch(self, ref: Ref) -> Any:
        """The value; numpy arrays in it are read-only. Raises RefLost, or WorkerFailed if the call behind it failed."""
        ...

    async def close(self) -> None:
        """Kills every worker. Refs that were returned stay readable."""
        ...


def seated(group: WorkerGroup, index: int) -> Worker:
    """The worker with this index. Raises LookupError where it has left the pool."""
    for worker in group.workers:
        if worker.index == index:
            return worker
    raise LookupError(f"the pool {group.spec.name} has no worker {index}")
