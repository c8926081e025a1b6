"""ToyPool is a pool of toy workers in virtual time, which die, hang, fail, lose values or damage bytes on demand.

A test chooses the durations of calls (Timing) and the faults (Fault); toy.py runs the controller on such pools.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from async_flowrl.observability.events import EventLog
from async_flowrl.types import EVALUATION
from separation.group import RefLost, Unusable, WorkerDied, seated
from separation.worker_process import RemoteError
from tests.support.failing_disk import Torn
from tests.support.virtual import VirtualPool, VirtualWorker

SLOW_FACTOR = 100.0
"""Factor on the duration of a call with the fault "slow"."""
DELAY_SECONDS = 5.0
"""What the fault "delay" adds to a call, less than any deadline of `toy_config`."""
REBUILD_SECONDS = 2.0
"""Virtual seconds until a replacement is built; its loading comes after that."""


@dataclass
class Timing:
    """Durations of calls in virtual seconds, by method; draws follow from (seed, worker, method, call number)."""

    seed: int = 0
    generate: float = 1.0
    score: float = 0.1
    update: float = 1.0
    transfer: float = 0.05
    save: float = 0.5
    spread: float = 0.0
    """Relative spread: each duration is multiplied by a draw from 1 - spread .. 1 + spread."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Factor per worker name."""
    slow_prompts: Mapping[str, float] = field(default_factory=dict)
    """Factor per prompt text, for generation."""
    evaluation: Mapping[int, float] = field(default_factory=dict)
    """Version → seconds of a ticket of its evaluation."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        known = {
            "generate": self.generate,
            "score": self.score,
            "train": self.update * len(args[0].metas) if method == "train" else 0.0,
            "receive": self.transfer,
            "save": self.save,
            "write": self.save,
        }
        if method == "generate" and args[0][0].kind == EVALUATION and args[0][0].version in self.evaluation:
            return self.evaluation[args[0][0].version]
        draw = random.Random(f"{self.seed}/{worker}/{method}/{call}").uniform(1 - self.spread, 1 + self.spread)
        prompt = self.slow_prompts.get(args[0][0].prompt.text, 1.0) if method == "generate" else 1.0
        return known.get(method, 0.0) * draw * self.slow.get(worker, 1.0) * prompt


Fault = Callable[[str, str, int], str | None]
"""A function (worker, method, call number from 1) → the call's fault, or None.

The method of an evaluation ticket is "generate/evaluation".
Faults are kill, hang, raise, unusable, slow and delay; for `receive` also corrupt and truncate; for `generate`
lose-images and lose-trajectory; for `score` nan and count; for `save` torn (death while writing) and full (no space).
"""


def name_of(method: str, args: tuple[Any, ...]) -> str:
    """Returns the name of the call's method as a Fault gets it."""
    name = method.rpartition(".")[2].removesuffix("_terms")
    if name == "generate" and args[0][0].kind == EVALUATION:
        return "generate/evaluation"
    return name


def no_fault(worker: str, method: str, number: int) -> str | None:
    return None


def once(worker: str, method: str, number: int, what: str) -> Fault:
    """Returns a Fault that hits one call only, e.g. `once("rollout-0", "generate", 2, "kill")` its second call."""
    return lambda *call: what if call == (worker, method, number) else None


@dataclass
class ListObserver(EventLog):
    """Keeps every event with its virtual time in place of a file."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time": self.now(), **fields})

    def state(self, worker: str, state: str) -> None:
        self.event("state", worker=worker, state=state)

    def of(self, event: str, **match: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in match.items())]


class ToyRef:
    """A result that stays on its worker's node (`separation.group.Ref`); `open` raises RefLost if it was lost."""

    def __init__(self, value: Any, *, lost: bool = False) -> None:
        self.value, self.lost = value, lost

    def open(self) -> Any:
        if self.lost:
            raise RefLost("a value is gone with its node")
        return self.value


@dataclass(frozen=True)
class World:
    """The settings that all pools of a toy run share."""

    timing: Timing = field(default_factory=Timing)
    fault: Fault = no_fault
    observer: ListObserver = field(default_factory=ListObserver)


LOST_VALUES = {"lose-images": 1, "lose-trajectory": 2}
"""Fault → index of the item of a split result that is lost."""


class ToyWorker(VirtualWorker):
    """A VirtualWorker that dies, hangs, fails, and loses or spoils values on demand.

    As with real workers, a call that nobody awaits any more goes on.
    """

    def __init__(self, pool: str, index: int, target: Any, *, incarnation: int, world: World) -> None:
        super().__init__(pool, index, target, incarnation=incarnation)
        self.world = world
        self.calls: dict[str, int] = {}
        self.dead = asyncio.Event()
        self.death: asyncio.Future[None] | None = None
        """Done when the worker dies: one for all of its calls."""
        self.running: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        if self.dead.is_set():
            raise WorkerDied(self.name, "dead already")
        task = asyncio.create_task(super().call(method, *args, lane=lane), name=f"{self.name}.{method}")
        self.running.add(task)
        task.add_done_callback(self._forget)
        self.death = self.death or asyncio.get_running_loop().create_future()
        await asyncio.wait([task, self.death], return_when=asyncio.FIRST_COMPLETED)
        if self.dead.is_set():
            raise WorkerDied(self.name, f"killed during {method}")
        return task.result()

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Any, ...]]:
        first, others = await super().call_split(method, *args, returns=returns, lane=lane)
        assert len(others) == returns - 1
        return first, tuple(value if isinstance(value, ToyRef) else ToyRef(value) for value in others)

    async def watch(self) -> NoReturn:
        await self.dead.wait()
        raise WorkerDied(self.name, "killed")

    def kill(self) -> None:
        self.dead.set()
        if self.death is not None and not self.death.done():
            self.death.set_result(None)
        for task in self.running:
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled():
            task.exception()

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        called, name = name_of(method, args), method.rpartition(".")[2].removesuffix("_terms")
        counted = called if name == "train" else name
        number = self.calls[counted] = self.calls.get(counted, 0) + 1
        fault = self.world.fault(self.name, called, number)
        if fault is not None and fault != "raise":
            self._injected(called, fault)
        seconds = self.world.timing.duration(self.name, name, number, args)
        factor = SLOW_FACTOR if fault == "slow" else 0.5 if fault == "kill" else 1.0
        await asyncio.sleep(seconds * factor + (DELAY_SECONDS if fault == "delay" else 0.0))
        if fault == "kill":
            self.kill()
        if fault in ("kill", "hang"):
            await asyncio.Event().wait()
        if fault == "raise":
            self._injected(called, fault)
            raise self._failed(method, RuntimeError("injected"))
        if fault == "unusable":
            raise self._failed(method, Unusable("injected"))
        values = [arg.open() if isinstance(arg, ToyRef) else arg for arg in args]
        try:
            result = self.run(method, self._spoilt(fault, values))
        except Torn:
            self.kill()
            raise
        except Exception as error:
            raise self._failed(method, error) from error
        if lost := LOST_VALUES.get(fault or ""):
            return (*result[:lost], ToyRef(None, lost=True), *result[lost + 1 :])
        return result

    def _injected(self, method: str, fault: str) -> None:
        """Records that a fault takes place: an exception when it is raised, anything else when the call begins."""
        self.world.observer.event("injected", worker=self.name, method=method, fault=fault)

    def _failed(self, method: str, error: Exception) -> Exception:
        return RemoteError.of(error).failure(self.name, method)

    def _spoilt(self, fault: str | None, values: list[Any]) -> list[Any]:
        if fault == "corrupt":
            values[1] = np.array(values[1])
            values[1][5] ^= 1
        if fault == "truncate":
            values[1] = values[1][:-1]
        if fault in ("nan", "count", "torn", "full"):
            self.target.spoil = fault
        return values


class ToyPool(VirtualPool):
    """A pool of ToyWorkers."""

    workers: list[Any]
    growth: Any

    def __init__(self, name: str, size: int, factory: Callable[..., Any], world: World) -> None:
        self.factory, self.world = factory, world
        self.incarnations = dict.fromkeys(range(size), 0)
        super().__init__(name, [self._build(name, index) for index in range(size)])
        self.everybody = list(self.workers)
        """All workers that have ever been in the pool."""
        self.replaced = 0

    def _build(self, pool: str, index: int) -> ToyWorker:
        worker = ToyWorker(pool, index, None, incarnation=self.incarnations[index], world=self.world)
        worker.target = self.factory(index=index, name=worker.name)
        return worker

    async def replace(self, index: int) -> ToyWorker:
        old: ToyWorker = seated(self, index)  # type: ignore[assignment]
        self.world.observer.event("replaced", worker=old.name, fenced=old.dead.is_set())
        old.kill()
        await asyncio.sleep(REBUILD_SECONDS / 2)
        if self.growth is not None:
            await self.growth.replacement(old)
        self.replaced += 1
        fresh = self.sit(index)
        self.workers[self.workers.index(old)] = fresh
        await asyncio.sleep(REBUILD_SECONDS / 2)
        return fresh

    def sit(self, index: int) -> ToyWorker:
        """Returns a new worker with this index, without adding it to the pool."""
        self.incarnations[index] = self.incarnations.get(index, -1) + 1
        fresh = self._build(self.spec.name, index)
        self.everybody.append(fresh)
        return fresh

    async def fetch(self, ref: Any) -> Any:
        return ref.open() if isinstance(ref, ToyRef) else ref
