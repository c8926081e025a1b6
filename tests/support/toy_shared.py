"""Toy workers that sample and train (`placement=shared`), in virtual time, under the real controller.

The pool is divided into two pools by the real code (separation/cohosted.py).
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import scoring_pools
from async_flowrl.run.pools import SUB_POOLS
from async_flowrl.shared.shared_worker import SharedRollout
from async_flowrl.shared.turns import patience
from separation.cohosted import Replacements, SubGroup
from tests.support.toy import TEXTS, Disturbance, ToyRun, toy_config, trained_on
from tests.support.toy_pool import Fault, Timing, ToyPool, ToyWorker, World, name_of, no_fault
from tests.support.toy_recovery import toy_ranks_meet
from tests.support.toy_reward import ToyReward
from tests.support.toy_rollout import ToyRollout
from tests.support.toy_trainer import ToyTrainer
from tests.support.virtual import run_virtual

SAMPLING = ("generate", "generate/evaluation")
TRAINING = ("train", "proximal")
ENDING = ("add_up", "take_step")
"""The phases of the end of an optimizer step over several processes."""


class ToySharedRollout(ToyRollout):
    """Rollout worker of a toy process; it keeps the versions of the trainer beside it by the real worker's method."""

    trainer: Any
    both: "ToyBoth"

    def seconds_at_work(self) -> float:
        since = self.both.sampling_since
        return 0.0 if since is None else asyncio.get_running_loop().time() - since

    def load(self) -> dict[str, str]:
        if hasattr(self, "receiver"):
            self.receiver.clear()
            return {"base_digest": "toy"}
        return super().load()

    keep_local = SharedRollout.keep_local


class ToySharedTrainer(ToyTrainer):
    @property
    def parameters(self) -> Any:
        return SimpleNamespace(named=lambda tensors: tensors)

    @property
    def name(self) -> str:
        return f"trainer-{self.index}"


class ToyBoth:
    """The object of a toy process: its trainer, its rollout worker, and the state that says which of them computes."""

    def __init__(self, config: Config, index: int, name: str) -> None:
        place = name.removeprefix(f"{SHARED}-")
        self.trainer = ToySharedTrainer(config, index, f"trainer-{place}")
        self.rollout = ToySharedRollout(config, index, f"rollout-{place}")
        self.rollout.trainer, self.rollout.both = self.trainer, self
        self.sampling_since: float | None = None
        self.changed, self.taken, self.training = asyncio.Condition(), False, 0
        self.measures = False
        """Whether the two phases of the end of the optimizer step take turns: to measure its KL before its end."""
        self.waited = 0.0
        """Seconds for which these phases have waited for their turns."""
        self._pause: asyncio.Task[None] | None = None
        """The pause before the next ticket, if another unit of training is expected."""

    def may_sample(self) -> bool:
        return not self.training and self._pause is None

    def pause(self, seconds: float) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._pause = asyncio.create_task(self._paused(seconds)) if seconds > 0.0 else None

    async def _paused(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self.changed:
            self._pause = None
            self.changed.notify_all()


class ToySharedWorker(ToyWorker):
    """A worker that makes one call at a time, calls of training first. Faults name it by the part that is called."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.died: float | None = None
        """When its process ended."""
        self.stopped = False
        """Whether the process is there and never answers again, on no lane."""

    def kill(self) -> None:
        if not self.dead.is_set():
            self.died = self.world.observer.now()
        super().kill()

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        result = await self.compute(method, args)
        if self.stopped:
            await asyncio.Event().wait()
        return result

    async def compute(self, method: str, args: tuple[Any, ...]) -> Any:
        name, both = name_of(method, args), self.target
        if name == "add_up":
            both.measures = args[0].probe is not None or both.trainer.measures_alone()
        measures = both.measures and name in ENDING
        if name in (*SAMPLING, *TRAINING) or measures:
            result = await self.in_turn(name, method, args, trains=measures or name in TRAINING)
        else:
            result = await super().serve(method, args)
        if name != "take_step":
            return result
        waited, both.waited = both.waited, 0.0
        return replace(result, waited=waited)

    async def in_turn(self, name: str, method: str, args: tuple[Any, ...], *, trains: bool) -> Any:
        both, asked = self.target, self.world.observer.now()
        async with both.changed:
            both.training += trains
            await both.changed.wait_for(lambda: not both.taken and (trains or both.may_sample()))
            both.training -= trains
            both.taken = True
        began = self.world.observer.now()
        both.waited += (began - asked) * (name in ENDING)
        both.sampling_since = None if trains else began
        try:
            return await super().serve(method, args)
        finally:
            self.world.observer.event("computed", worker=self.name, kind=name, start=began)
            both.taken, both.sampling_since = False, None
            if name in TRAINING:
                both.pause(patience(self.world.observer.now() - began) if args[0].more else 0.0)
            async with both.changed:
                both.changed.notify_all()


class ToySharedPool(ToyPool):
    def _build(self, pool: str, index: int) -> ToyWorker:
        worker = ToySharedWorker(pool, index, None, incarnation=self.incarnations[index], world=self.world)
        worker.target = self.factory(index=index, name=worker.name)
        return worker


@contextmanager
def shared_toys() -> Iterator[None]:
    """In the block, controllers of toy runs have shared pools, whose ranks add up without a process group."""
    groups = mock.patch("tests.support.toy_recovery.toy_groups", shared_groups)
    with groups, toy_ranks_meet(lambda worker: worker.process.target.trainer):
        yield


def shared_config(k: int, workers: int, **changes: Any) -> Config:
    pools = {"placement": SHARED, "trainer__num_workers": workers, "rollout__num_workers": workers}
    return toy_config(k, **pools, **changes)


def shared_groups(config: Config, world: World) -> dict[str, Any]:
    whole = ToySharedPool(SHARED, config.trainer.num_workers, partial(ToyBoth, config), world)
    whole.spec = whole.spec.__class__(
        SHARED, "", len(whole.workers), lanes=("train", "publish", "keep", "save", "sync", "control")
    )
    for worker in whole.workers:
        worker.target.trainer.ranks = lambda: [other.target.trainer for other in whole.workers]
    replacements = Replacements(whole)
    rewards = {
        pool.name: ToyPool(pool.name, pool.workers, partial(ToyReward, config), world) for pool in scoring_pools(config)
    }
    sub_groups = {pool: SubGroup(replacements, pool, lanes) for pool, lanes in SUB_POOLS.items()}
    return {SHARED: whole, **sub_groups, **rewards}


def shared_virtual(
    config: Config,
    timing: Timing | None = None,
    fault: Fault = no_fault,
    *,
    disturb: Disturbance | None = None,
    texts: Sequence[str] = TEXTS,
) -> ToyRun:
    """Runs a toy run on `texts` in virtual time and returns its results. Raises the error that ends it."""

    async def body() -> ToyRun:
        world = World(timing or Timing(), fault)
        groups = shared_groups(config, world)
        for worker in groups[SHARED].workers:
            worker.target.rollout.load()
        return await trained_on(
            config, groups, world.observer, disturb, hosted=lambda worker: worker.process.target.trainer, texts=texts
        )

    return run_virtual(body(), horizon=1e5)
