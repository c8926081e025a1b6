"""Tests of real trainer ranks killed by SIGKILL in a step: weights and metrics are those of an undisturbed step."""

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.policies.registry import resolve_model
from async_flowrl.tickets.ticket import TRAIN, Ticket
from async_flowrl.training.fsdp import World
from async_flowrl.training.merged_stats import merged
from async_flowrl.training.messages import UpdateStats
from separation import rendezvous
from separation.group import WorkerFailed
from separation.rendezvous import join_process_group, rank_environment
from tests.support import trainer_rig as rig
from tests.support.process_pool import ProcessPool
from tests.support.toy_pool import ListObserver

pytestmark = pytest.mark.serial("ranks")

DEATHS = {
    "others": {
        "trainer-1": (0, "micro-batch"),
        "trainer-2": (1, "manifest"),
        "trainer-1.1": (2, "all-reduce"),
        "trainer-2.1": (3, "stepped"),
    },
    "the first": {
        "trainer-0": (0, "micro-batch"),
        "trainer-1": (1, "manifest"),
        "trainer-0.1": (2, "all-reduce"),
        "trainer-1.1": (3, "stepped"),
    },
}
"""Each death of `the first` is of the rank that sends the weights at that moment."""
STEPS, GROUPS = 5, 6
MEETING_SECONDS = 40.0
KEYS = f"{__name__}:keys_of_the_store"


def configuration(**trainer: Any) -> Config:
    config = rig.tiny_config(micro_batch_size=2, shard="none", **trainer)
    config.prompts_per_step, config.model.dtype = GROUPS, "float32"
    return config


def batches(config: Config, steps: int = STEPS) -> list[list[rig.Handed]]:
    sampler = rig.Sampler(config)
    return [
        [sampler.group(step, group, version=max(0, step - 1), age=min(step, 1)) for group in range(GROUPS)]
        for step in range(steps)
    ]


@dataclass
class Found:
    digest: str
    metrics: list[Any]
    observer: ListObserver


def alone(config: Config, given: list[list[rig.Handed]]) -> Found:
    torch.set_num_threads(1)
    worker, metrics = rig.trainer(config), []
    for step, batch in enumerate(given):
        metrics.append(rig.update(worker, step, batch).metrics)
    return Found(worker.weights_digest(), metrics, ListObserver())


async def with_ranks(config: Config, given: list[list[rig.Handed]], deaths: dict[str, tuple[int, str]]) -> Found:
    """What the controller's `update` does in a batch hand-over, on real processes. Successors are waited for."""
    observer, algorithm = ListObserver(), build_algorithm(config)
    model = resolve_model(config.model)
    arguments = {"config": config, "model": model, "deaths": deaths}
    ranks = config.trainer.num_workers
    pool = ProcessPool("trainer", ranks, "tests.support.dying_trainer:DyingTrainer", arguments)
    trainers, metrics = TrainerGroup(pool, algorithm), []
    steps = len(given[0][0][1][0].train_steps)
    requests = SimpleNamespace(request=lambda ticket: SimpleNamespace(train_steps=range(steps)))
    try:
        await join_process_group(pool, timeout=300)
        infos = await trainers.all("load")
        ctx: Any = SimpleNamespace(
            config=config, observer=observer, requests=requests, base_digest=infos[0]["base_digest"]
        )
        trainers.laid_out(config, infos[0]["ranks_per_replica"])
        for step, batch in enumerate(given):
            if waiting := list(trainers.living.successors._loading.values()):
                await asyncio.wait(waiting)
            trainers._came(await trainers.living.welcome(ctx, step))
            trainers._owners.begin(len(batch))
            handed = trainers._owned(ctx, [as_handed(step, *group) for group in batch])
            _, stats = await trainers._optimizer_step(ctx, step, 0, len(batch), trainers._taken(handed))
            metrics.append(merged(stats).metrics)
        assert len(set(await trainers.all("weights_digest"))) == 1
        return Found(await trainers.living.first.call("weights_digest"), metrics, observer)
    finally:
        await trainers.living.successors.settle()
        await pool.close()


def as_handed(step: int, meta: Any, trajectories: list[Any]) -> HandedGroup:
    tickets = [Ticket(TRAIN, meta.group, step, meta.group, 0, meta.version) for _ in trajectories]
    for ticket, trajectory in zip(tickets, trajectories, strict=True):
        ticket.payload = (None, trajectory)
    return HandedGroup(tickets, None, meta.advantages, meta)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("who", DEATHS)
def test_ranks_killed_at_every_place_of_a_step_leave_the_weights_as_they_are(who: str) -> None:
    config = configuration(num_workers=3)
    config.deadlines.update = 120.0
    given = batches(config)
    calm, found = alone(configuration(), given), asyncio.run(with_ranks(config, given, DEATHS[who]))
    assert found.digest == calm.digest
    assert [each["loss"] for each in found.metrics] == [each["loss"] for each in calm.metrics]
    deaths = [(event["worker"], event["kind"]) for event in found.observer.of("fault")]
    assert [name for name, _ in deaths] == list(DEATHS[who])
    again = found.observer.of("recomputed")
    assert [event["step"] for event in again] == [0, 1, 2], "what every rank had added up needs no second time"
    ranks = (1, 2) if who == "others" else (0, 1)
    successors = [f"trainer-{rank}.{number}" for number in (1, 2) for rank in ranks]
    assert [event["worker"] for event in found.observer.of("rejoined")] == successors


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["micro-batch", "manifest", "all-reduce", "stepped"])
def test_a_shard_group_that_loses_a_rank_leaves_the_weights_to_the_others(place: str) -> None:
    """Two replicas of two ranks; the first one is that of the rank that sends the weights."""
    config = configuration(num_workers=4)
    config.trainer.shard, config.trainer.shard_size, config.deadlines.update = "hybrid", 2, 120.0
    given = batches(config, 3)
    found = asyncio.run(with_ranks(config, given, {"trainer-1": (1, place)}))
    calm = alone(configuration(), given)
    assert found.digest == calm.digest
    assert [each["loss"] for each in found.metrics] == [each["loss"] for each in calm.metrics]
    assert {event["worker"] for event in found.observer.of("fault")} == {"trainer-0", "trainer-1"}
    assert len(found.observer.of("recomputed")) == (place != "stepped")


def two_updates() -> Config:
    config = configuration(updates_per_batch=2)
    config.algorithm.correction = "none"
    return config


def in_two_updates(batch: list[rig.Handed], *, late: bool, forgets: bool = False) -> str:
    """Weights after a batch of two optimizer steps; `late`: the second one's old predictions are made after the first.

    `forgets`: the weights at the start of the batch are gone by then, so it predicts with those it has.
    """
    config = two_updates()
    worker = rig.trainer(config)
    worker.world = worker.update._inputs.world = World(0, 2)  # the other one has died: the sum is this one's
    halves = [batch[:2], batch[2:]]
    for update, half in enumerate(halves):
        worker.update.begin(0, rig.StepPlan(rows=rig.rows(half), update=update, probe=False))
        metas = tuple(meta for meta, _ in halves[1])
        tickets = [ticket for _, own in halves[1] for ticket in own]
        if forgets and update:
            worker.update._start = None
        if update == int(late):
            worker.update.proximal(rig.TrainRequest(0, metas), *tickets)
        for meta, own in half:
            worker.update.accumulate([meta], *own)
        worker.update.add_up(rig.TrainRequest(0, (), finishes=True))
        assert isinstance(worker.take_step(), UpdateStats)
    return worker.weights_digest()


def test_old_predictions_that_were_lost_are_made_again_from_the_weights_of_then() -> None:
    sampler = rig.Sampler(two_updates())
    batch = [sampler.group(0, group) for group in range(4)]
    expected = in_two_updates(batch, late=False)
    assert in_two_updates(batch, late=True) == expected != in_two_updates(batch, late=True, forgets=True)


def test_a_sum_is_untouched_by_adding_up_and_refuses_another_attempt() -> None:
    config = configuration()
    worker, once = rig.trainer(config), rig.trainer(config)
    (batch,) = batches(config, 1)
    for trainer in (worker, once):
        trainer.world = trainer.update._inputs.world = World(0, 2)
        trainer.update.begin(0, rig.StepPlan(rows=rig.rows(batch), attempt=4))
        for meta, own in batch:
            trainer.update.accumulate([meta], *own)
    end = rig.TrainRequest(0, (), finishes=True, attempt=4)
    with pytest.raises(RuntimeError, match="attempt 3 is added up, this rank began 4"):
        worker.update.add_up(replace(end, attempt=3))
    for _ in range(3):
        worker.update.add_up(end)
    once.update.add_up(end)
    with pytest.raises(RuntimeError, match="step 0 is under way"):
        worker.snapshot()
    assert worker.take_step().digest == once.take_step().digest != ""
    with pytest.raises(RuntimeError, match="before add_up"):
        worker.take_step()
    other = rig.trainer(config)
    digest, state = worker.state()
    assert other.take_over(digest, state) == worker.parameters.fingerprint()
    assert other.state()[0] == digest
    with pytest.raises(RuntimeError, match="was sent with"):
        other.take_over("0" * 32, state)


def keys_of_the_store() -> int:
    """Run on rank 0, beside its `join`: what ranks have written for each other until now."""
    (store,) = rendezvous._stores.values()
    return int(store.num_keys())


async def meeting_in_vain() -> None:
    """Rank 0 waits for one that never comes, until `abort` is called."""
    pool = ProcessPool("trainer", 1, "types:SimpleNamespace", {})
    try:
        (worker,) = pool.workers
        port = await worker.call("separation.rendezvous:open_store", 2, MEETING_SECONDS)
        empty = await worker.call(KEYS, lane="control")
        environment = rank_environment(rank=0, world=2, address=worker.node, port=port, timeout=MEETING_SECONDS)
        joining = asyncio.create_task(worker.call("separation.rendezvous:join", environment))
        while await worker.call(KEYS, lane="control") == empty and not joining.done():
            await asyncio.wait([joining], timeout=0.05)
        await worker.call("separation.rendezvous:abort", lane="control")
        await joining
    finally:
        await pool.close()


def test_a_rank_that_dies_while_they_meet_does_not_keep_the_others() -> None:
    """The time-out would raise a DistStoreError."""
    with pytest.raises(WorkerFailed, match="DistNetworkError"):
        asyncio.run(meeting_in_vain())
