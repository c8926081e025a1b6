"""The interface of worker pools: PoolSpec, Worker, WorkerGroup, Growth, and their errors.

A worker holds one Python object, whose methods `Worker.call` runs. A lane is a queue of calls with one thread: calls on
one lane run one at a time, in order; different lanes run at the same time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeAlias

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Handle of a result in the worker's memory or in Ray's object store; an argument of other calls, or of `fetch`.
Ref: TypeAlias = object


class WorkerDied(RuntimeError):
    """Raised if the worker's process has ended, was killed, or is Unusable. `worker` is its name, `reason` a text."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"{worker} died: {reason}")
        self.worker, self.reason = worker, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.reason)


class WorkerFailed(RuntimeError):
    """Raised if a method raised inside the worker, which lives on; `kind` is the exception's class name."""

    def __init__(self, worker: str, method: str, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{worker}.{method} raised {kind}: {message}")
        self.worker, self.method, self.kind, self.message = worker, method, kind, message
        self.remote_traceback = remote_traceback
        self.add_note(f"in the worker:\n{remote_traceback}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.method, self.kind, self.message, self.remote_traceback)


class Unusable(RuntimeError):
    """Raised by a method of a worker that can do nothing any more: the caller gets WorkerDied, and has to kill it."""


class RefLost(RuntimeError):
    """Raised if the value of a ref no longer exists: its node died, or the value was freed."""


class NoSeat(RuntimeError):
    """Raised if a worker of an elastic pool is lost and no node has room for its replacement now."""


@dataclass(frozen=True)
class PoolSpec:
    """Description of a pool. Raises ValueError for an uneven `workers_per_node`, and for GPUs in `environment`."""

    name: str
    factory: str  # `pkg.module:attr` of the function or class that makes a worker's object.
    num_workers: int
    # Keyword arguments of the factory; `index` and `name` of the worker are added to them.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    gpus_per_worker: float = 0.0
    threads: int = 1  # Number of torch threads per worker.
    lanes: Sequence[str] = ()  # Names of the lanes besides "main".
    # True for the ranks of one process group: they are reserved before other pools, all in one placement group.
    process_group: bool = False
    # Packages whose code must be the same on every node, if the cluster has several nodes (Ray only).
    same_code: Sequence[str] = ()
    # Number of workers on each node; num_workers / workers_per_node different nodes are then needed. None means any
    # nodes with room; the workers of a process group are put on as few nodes as possible.
    workers_per_node: int | None = None
    # Environment variables, set in the process of every worker before its factory is imported (Ray only).
    environment: Mapping[str, str] = field(default_factory=dict)
    # True lets segments of torch's memory allocator grow, so that blocks of many sizes leave no gaps. It holds for
    # workers with a GPU whose environment has no settings of the allocator, where the driver can do it (Ray only).
    expandable_segments: bool = False
    min_workers: int | None = None  # Number of workers with which the pool may start; None means num_workers.
    # Number of workers up to which the pool grows while nodes have room; None means num_workers.
    max_workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers_per_node is not None and self.num_workers % self.workers_per_node:
            raise ValueError(
                f"workers_per_node={self.workers_per_node} must divide the {self.num_workers} workers of {self.name}"
            )
        if VISIBLE_DEVICES in self.environment:
            raise ValueError(f"{VISIBLE_DEVICES} of the pool {self.name} follows from its seats and can't be set")

    @property
    def elastic(self) -> bool:
        return self.min_workers is not None or self.max_workers is not None

    @property
    def least(self) -> int:
        return self.num_workers if self.min_workers is None else self.min_workers

    @property
    def most(self) -> int:
        return self.num_workers if self.max_workers is None else self.max_workers

    @property
    def size(self) -> str:
        """The size as text, e.g. `8`, or `8 (2 to 16)` for an elastic pool."""
        return f"{self.num_workers} ({self.least} to {self.most})" if self.elastic else f"{self.num_workers}"


class Worker(Protocol):
    name: str  # `<pool>-<index>` for the first worker with this index, `<pool>-<index>.<n>` for its n-th replacement.
    pool: str
    index: int
    pid: int
    node: str  # IP address of its node.

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        """Runs a method of the worker's object and returns its result.

        `method` is the method's name, `part.method` for one of an attribute, or `pkg.module:function`. An argument that
        is a ref is replaced by its value; a ref inside another argument is not. Raises WorkerDied, WorkerFailed or
        RefLost, and ValueError for an unknown lane. Cancelling the await does not stop the method; its result is then
        discarded.
        """

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Ref, ...]]:
        """Runs a method that returns `returns` items; returns the first, and refs of the others. Raises as `call`."""

    async def watch(self) -> NoReturn:
        """Waits until the worker dies and raises WorkerDied, also while no call is under way."""

    def kill(self) -> None:
        """Ends the worker at once (SIGKILL; a thread ends its method first); open and later calls raise WorkerDied."""


class Growth(Protocol):
    """Changes the size of an elastic pool. A seat is a reserved place for one worker on a node."""

    async def seat(self) -> Any:
        """Waits for a seat for one more worker, at most `max_workers`. The caller must fill it or give it back."""

    async def fill(self, seat: Any) -> Worker:
        """Builds the worker of a seat, adds it to the pool and returns it; several may be built at the same time.

        Raises the errors of building a worker; the seat is still taken then. If the call is cancelled, no worker is
        left.
        """

    async def give_back(self, seat: Any) -> None:
        """Gives back a seat that no worker has."""

    async def departures(self, reported: Collection[str]) -> Mapping[str, float]:
        """Waits until nodes are announced to end; returns the names of their workers (never none), except `reported`.

        The values are the seconds until the node ends, infinity if that time is not known.
        """

    async def release(self, index: int) -> None:
        """Kills the worker, removes it from the pool and gives its seat back. A second call does nothing."""


class WorkerGroup(Protocol):
    spec: PoolSpec
    workers: list[Worker]  # In the order of their indices; an elastic pool may lack some indices.
    growth: Growth | None  # None if the pool's size is fixed.

    async def replace(self, index: int) -> Worker:
        """Kills worker `index`, waits until it has ended, and returns its replacement, which is built and in the pool.

        The replacement takes the same place, in an elastic pool any free seat. Raises NoSeat if an elastic pool has no
        free seat, WorkerDied, WorkerFailed or OtherCode if it can't be built, DeadlineExceeded if that takes too long.
        """

    async def fetch(self, ref: Ref) -> Any:
        """Returns a ref's value, numpy arrays read-only. Raises RefLost, or WorkerFailed if the ref's call failed."""

    async def close(self) -> None:
        """Kills every worker. Values of existing refs can still be fetched."""


def seated(group: WorkerGroup, index: int) -> Worker:
    """Returns the pool's worker with this index. Raises LookupError if it has left the pool."""
    for worker in group.workers:
        if worker.index == index:
            return worker
    raise LookupError(f"the pool {group.spec.name} has no worker {index}")
