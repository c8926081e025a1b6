"""Pools of toy workers in virtual time: lanes, deaths, hangs, lost values and spoilt bytes, all of them on demand."""

import asyncio
import importlib
import random
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from async_flowrl.types import EVALUATION
from separation.group import PoolSpec, RefLost, WorkerDied, WorkerFailed
from tests.support.toy_models import Torn

SLOW = 100.0
REBUILD = 2.0
"""Virtual seconds until a replacement is there, before it loads."""


@dataclass
class Timing:
    """How long each method takes, in virtual seconds: constant, or drawn from (seed, worker, method, call number)."""

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

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        known = {
            "generate": self.generate,
            "score": self.score,
            "train": self.update * len(args[0].metas) if method == "train" else 0.0,
            "receive": self.transfer,
            "save": self.save,
        }
        draw = random.Random(f"{self.seed}/{worker}/{method}/{call}").uniform(1 - self.spread, 1 + self.spread)
        prompt = self.slow_prompts.get(args[0].prompt.text, 1.0) if method == "generate" else 1.0
        return known.get(method, 0.0) * draw * self.slow.get(worker, 1.0) * prompt


Fault = Callable[[str, str, int], str | None]
"""(worker, method, call number) → None or what goes wrong; an evaluation ticket's method is "generate/evaluation",
that of a call which finishes an optimizer step "train_last":
kill, hang, raise, slow; for `receive` corrupt, truncate; for `generate` lose-images, lose-trajectory; for `score` nan,
count; for `save` torn (it dies inside the writing), full (no space left).
"""


def name_of(method: str, args: tuple[Any, ...]) -> str:
    """What a Fault knows the call by."""
    if method == "generate" and args[0].kind == EVALUATION:
        return "generate/evaluation"
    return "train_last" if method == "train" and args[0].finishes else method


def no_fault(worker: str, method: str, number: int) -> str | None:
    return None


@dataclass
class ListObserver:
    """Keeps every event with its virtual time."""

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
    """A value that stayed in its worker's node."""

    def __init__(self, value: Any, *, lost: bool = False) -> None:
        self.value, self.lost = value, lost

    def open(self) -> Any:
        if self.lost:
            raise RefLost("a value is gone with its node")
        return self.value


@dataclass(frozen=True)
class World:
    """What all pools of a run share."""

    timing: Timing
    fault: Fault
    observer: ListObserver


class VirtualWorker:
    """Hosts one toy object; lanes are locks. As with real workers, a call that nobody awaits any more goes on."""

    def __init__(self, pool: str, index: int, name: str, *, target: Any, world: World) -> None:
        self.pool, self.index, self.name, self.target, self.world = pool, index, name, target, world
        self.pid, self.node = 0, "virtual"
        self.calls: dict[str, int] = {}
        self.dead = asyncio.Event()
        self.lanes: dict[str, asyncio.Lock] = {}
        self.running: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        return (await self._await(method, args, lane))[0]

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Any, ...]]:
        result, fault = await self._await(method, args, lane)
        assert len(result) == returns
        lost = {"lose-images": 0, "lose-trajectory": 1}.get(fault or "")
        return result[0], tuple(ToyRef(value, lost=index == lost) for index, value in enumerate(result[1:]))

    async def watch(self) -> NoReturn:
        await self.dead.wait()
        raise WorkerDied(self.name, "killed")

    def kill(self) -> None:
        self.dead.set()
        for task in self.running:
            task.cancel()

    async def _await(self, method: str, args: tuple[Any, ...], lane: str) -> tuple[Any, str | None]:
        if self.dead.is_set():
            raise WorkerDied(self.name, "dead already")
        task = asyncio.create_task(self._run(method, args, lane), name=f"{self.name}.{method}")
        self.running.add(task)
        task.add_done_callback(self._forget)
        death = asyncio.create_task(self.dead.wait(), name=f"death of {self.name}")
        try:
            await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise WorkerDied(self.name, f"killed during {method}")
            return task.result()
        finally:
            death.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled():
            task.exception()

    async def _run(self, method: str, args: tuple[Any, ...], lane: str) -> tuple[Any, str | None]:
        async with self.lanes.setdefault(lane, asyncio.Lock()):
            called = name_of(method, args)
            counted = called if method == "train" else method
            number = self.calls[counted] = self.calls.get(counted, 0) + 1
            fault = self.world.fault(self.name, called, number)
            if fault is not None:
                self.world.observer.event("injected", worker=self.name, method=called, fault=fault)
            seconds = self.world.timing.duration(self.name, method, number, args)
            await asyncio.sleep(seconds * (SLOW if fault == "slow" else 0.5 if fault == "kill" else 1.0))
            if fault == "kill":
                self.kill()
            if fault in ("kill", "hang"):
                await asyncio.Event().wait()
            # A method that is to raise does so even if an argument is lost too.
            values = [] if fault == "raise" else [arg.open() if isinstance(arg, ToyRef) else arg for arg in args]
            try:
                return self._method(method, self._spoilt(fault, values), fault), fault
            except Torn:
                self.kill()
                raise

    def _method(self, method: str, values: list[Any], fault: str | None) -> Any:
        try:
            if fault == "raise":
                raise RuntimeError("injected")
            if ":" in method:
                module, name = method.split(":")
                return getattr(importlib.import_module(module), name)(*values)
            return getattr(self.target, method)(*values)
        except Exception as error:
            text = traceback.format_exc()
            raise WorkerFailed(self.name, method, type(error).__name__, str(error), text) from error

    def _spoilt(self, fault: str | None, values: list[Any]) -> list[Any]:
        if fault == "corrupt":
            values[1] = np.array(values[1])
            values[1][5] ^= 1
        if fault == "truncate":
            values[1] = values[1][:-1]
        if fault in ("nan", "count", "torn", "full"):
            self.target.spoil = fault
        return values


class VirtualGroup:
    """A pool of VirtualWorkers."""

    def __init__(self, spec: PoolSpec, factory: Callable[..., Any], world: World) -> None:
        self.spec, self.factory, self.world = spec, factory, world
        self.generation = [0] * spec.num_workers
        self.workers: list[Any] = [self._build(index) for index in range(spec.num_workers)]
        self.everybody = list(self.workers)
        """Every worker there has ever been."""
        self.replaced = 0

    def _build(self, index: int) -> VirtualWorker:
        suffix = f".{self.generation[index]}" if self.generation[index] else ""
        name = f"{self.spec.name}-{index}{suffix}"
        target = self.factory(index=index, name=name, **self.spec.arguments)
        return VirtualWorker(self.spec.name, index, name, target=target, world=self.world)

    async def replace(self, index: int) -> VirtualWorker:
        old = self.workers[index]
        self.world.observer.event("replaced", worker=old.name, fenced=old.dead.is_set())
        old.kill()
        await asyncio.sleep(REBUILD / 2)
        self.generation[index] += 1
        self.replaced += 1
        fresh = self.workers[index] = self._build(index)
        self.everybody.append(fresh)
        await asyncio.sleep(REBUILD / 2)
        return fresh

    async def fetch(self, ref: Any) -> Any:
        return ref.open() if isinstance(ref, ToyRef) else ref

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()
