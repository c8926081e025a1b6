"""Stand-ins for the processes of `placement=shared` in a simulation: each is a device that samples or trains.

The real controller (controller/trainer.py) decides which process trains which groups. The order of tickets and training
on a device follows the rule of shared/turns.py.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Signal
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.plan.stand_ins import PlannedWorker, TicketsAsRequests, first_of
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import Layout, Work
from async_flowrl.shared.turns import patience
from async_flowrl.tickets.request import sampling
from async_flowrl.tickets.table import EVALUATION, TRAIN, Ticket
from async_flowrl.training.messages import Manifest, StepPlan, Summed, TrainRequest, UpdateStats
from async_flowrl.training.parts import RankPosition, cut, parts_of
from async_flowrl.training.trust_region import MEASURED_EVERY_STEPS
from async_flowrl.types import Prompt, Sampling
from separation.virtual import VirtualPool, VirtualWorker

Booked = Callable[[str, str], None]
"""Function that is called with (worker name, state) whenever a device begins or ends a piece of work."""


class Device:
    """Device of one process. It computes one unit of work at a time, training before tickets, and interrupts none."""

    def __init__(self, index: int, booked: Booked, units: list[Unit]) -> None:
        self._rollout, self._trainer = f"rollout-{index}", f"trainer-{index}"
        self._booked, self._units = booked, units
        self._changed = Signal()
        self._taken = False
        self._waiting = 0
        """Number of calls to train that wait for the unit under way."""
        self._paused_until = 0.0
        """End of the pause before the next ticket, in virtual seconds."""
        self._owed: float | None = None
        """Seconds by which work beside the ticket under way has delayed it; None if no ticket is under way."""

    async def train(self, seconds: float, step: int, *, more: bool = False) -> None:
        """Computes for `step` after the unit under way; with `more` the next ticket waits for a further call."""
        self._waiting += 1
        await self._changed.until(lambda: not self._taken)
        self._waiting, self._taken = self._waiting - 1, True
        began = _now()
        await self._compute(self._trainer, step, seconds)
        self._taken, self._paused_until = False, _now() + patience(_now() - began) if more else 0.0
        self._changed.notify()

    async def sample(self, seconds: float, step: int, *, evaluation: bool = False) -> None:
        """Makes a ticket of `step`, once no training computes, waits or is expected."""
        while self._taken or self._waiting or _now() < self._paused_until:
            busy = self._taken or self._waiting
            with suppress(TimeoutError):
                async with asyncio.timeout(None if busy else self._paused_until - _now()):
                    await self._changed.wait()
        self._taken, self._owed = True, 0.0
        began = _now()
        self._booked(self._rollout, "busy")
        await asyncio.sleep(seconds)
        while owed := self._owed:
            self._owed = 0.0
            await asyncio.sleep(owed)
        self._booked(self._rollout, "idle")
        self._units.append(Unit(self._rollout, step, began, _now(), evaluation=evaluation))
        self._taken, self._owed = False, None
        self._changed.notify()

    async def beside(self, seconds: float, step: int) -> None:
        """Computes for `step` at once; a ticket that is under way takes so much longer."""
        if self._owed is None:
            await self.train(seconds, step)
            return
        self._owed += seconds
        self._booked(self._rollout, "idle")
        await self._compute(self._trainer, step, seconds)
        if self._owed is not None:
            self._booked(self._rollout, "busy")

    async def _compute(self, worker: str, step: int, seconds: float) -> None:
        began = _now()
        self._booked(worker, "busy")
        await asyncio.sleep(seconds)
        self._booked(worker, "idle")
        self._units.append(Unit(worker, step, began, _now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


class SharedRollout(PlannedWorker):
    """Stand-in for the rollout worker of a shared process; its tickets occupy the device."""

    def __init__(self, device: Device, index: int, work: Work, layout: Layout, seed: int) -> None:
        super().__init__("rollout", index, work, layout, seed, [])
        self._device = device

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "score":
            return await super().serve(method, args)
        first = first_of(args)
        await self._device.sample(self.duration(method, args), first.step, evaluation=first.kind == EVALUATION)
        return self.run(method, args)


class SharedRank(VirtualWorker):
    """Stand-in for the trainer rank of a shared process.

    Its calls occupy the device, except `take_step`, which runs beside a ticket.
    """

    def __init__(self, device: Device, index: int, work: Work, config: Config, seed: int) -> None:
        ranks = config.trainer.num_workers
        self.place, self._samples = RankPosition(index, ranks), config.trainer.micro_batch_size
        super().__init__("trainer", index, PlannedSums(self.place, self._samples))
        self._device, self._work, self._seed = device, work, seed
        self._measures = False
        """True if the KL of the optimizer step under way is measured before its end."""
        self._whole = work.update.scaled(1.0 + work.serial * (ranks - 1))
        """Duration of a whole group on one of several ranks.

        If all ranks are busy, together they train as fast as `Work.serial` says.
        """

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "train":
            request: TrainRequest = args[0]
            await self._device.train(self._seconds(request), request.step, more=request.more)
        elif method == "take_step":
            step = self.target.step
            if self._measures:
                await self._device.train(0.0, step)
            await self._device.beside(self._work.finish.draw(f"{self._seed}/finish/{step}"), step)
        elif method == "add_up":
            self._measures = args[0].probe is not None
            if self._measures:  # The measurement of the KL waits for its turns; its duration is not planned.
                await self._device.train(0.0, args[0].step)
        return self.run(method, args)

    def _seconds(self, request: TrainRequest) -> float:
        own = Counter(part.group for part in parts_of(request.metas, self.place, self._samples))
        seconds = self._work.finish.draw(f"{self._seed}/finish/{request.step}") if request.finishes else 0.0
        for index, count in own.items():
            meta = request.metas[index]
            share = count / len(cut(meta.selected, self._samples))
            drawn = self._whole.draw(f"{self._seed}/update/{request.step}/{meta.group}")
            seconds += share * drawn * self._work.cost(self._seed, request.step, meta.group)
        return seconds


class PlannedSums:
    """Target of a stand-in rank: records the parts that were added to its sum, and computes nothing."""

    def __init__(self, place: RankPosition, samples: int) -> None:
        self._place, self._samples = place, samples
        self.step, self._plan = -1, StepPlan(rows=0)
        self._parts: list[tuple[int, int]] = []

    def train(self, request: TrainRequest, *trajectories: Any) -> Manifest | UpdateStats:
        self._begin(request)
        for part in parts_of(request.metas, self._place, self._samples):
            self._parts.append((request.metas[part.group].group, part.part))
        if request.finishes:
            return self.take_step()
        return Manifest(self.step, self._plan.update, self._plan.attempt, tuple(self._parts))

    def add_up(self, request: TrainRequest, *trajectories: Any) -> Summed:
        self._begin(request)
        return Summed(None, ())

    def take_step(self) -> UpdateStats:
        return UpdateStats(
            self.step,
            self._plan.update,
            skipped=False,
            metrics={},
            measures_next=(self.step + 1) % MEASURED_EVERY_STEPS == 0,
        )

    def _begin(self, request: TrainRequest) -> None:
        if request.begins is not None:
            self.step, self._plan, self._parts = request.step, request.begins, []


@dataclass(frozen=True)
class PlannedPrompt(Prompt):
    """Prompt that names its group, from which the stand-in of a reward draws its duration."""

    kind: str = TRAIN
    step: int = 0
    group: int = 0


@dataclass(frozen=True)
class PlannedRequest:
    """Request of a ticket, with the fields that stand-in workers and the plan of an optimizer step read."""

    kind: str
    ordinal: int
    step: int
    group: int
    version: int
    train_steps: tuple[int, ...] = (0,)


class TrainedRequests(TicketsAsRequests):
    """Request builder with the methods that the real trainer calls for a group."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._sampling = sampling(config)

    def request(self, ticket: Ticket) -> PlannedRequest:  # type: ignore[override]
        return PlannedRequest(ticket.kind, ticket.ordinal, ticket.step, ticket.group, ticket.version)

    def prompt(self, ticket: Ticket) -> PlannedPrompt:  # type: ignore[override]
        return PlannedPrompt(ticket.group, "", kind=ticket.kind, step=ticket.step, group=ticket.group)

    def sampling(self, ticket: Ticket) -> Sampling:
        return self._sampling

    def image_seed(self, name: str, step: int, group: int, image: int) -> int:
        return 0

    def trained(self, step: int, spread: Sequence[bool | None]) -> dict[str, int]:
        return {}


def one_pool(
    work: Work, layout: Layout, config: Config, seed: int, booked: Booked, units: list[Unit]
) -> tuple[VirtualPool, TrainerGroup]:
    """Returns the rollout pool and the trainer of `config.trainer.num_workers` processes that sample and train."""
    devices = [Device(index, booked, units) for index in range(config.trainer.num_workers)]
    rollouts = [SharedRollout(device, index, work, layout, seed) for index, device in enumerate(devices)]
    ranks = [SharedRank(device, index, work, config, seed) for index, device in enumerate(devices)]
    return VirtualPool("rollout", rollouts), TrainerGroup(VirtualPool("trainer", ranks), build_algorithm(config))
