"""Code of the ranks in tests of several ranks; a module of its own, so that processes can import it."""

import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from async_flowrl.config.schema import Config
from async_flowrl.controller.replicas import Assignment
from async_flowrl.policies.registry import resolve_model
from async_flowrl.training.fsdp import replica_mesh
from async_flowrl.training.messages import GroupSums, TrainRequest, UpdateStats, merged, with_means
from async_flowrl.training.parts import World, tickets_for, tickets_of
from async_flowrl.training.trainer_worker import TrainerWorker
from separation.rendezvous import join, leave
from tests.support import trainer_rig as rig
from tests.support.forked import METHOD
from tests.support.ports import free_port

Job = tuple[Config, list[list[rig.Handed]]]
Outcome = dict[str, Any]


def run_ranks(world: int, jobs: list[Job], folder: Path) -> list[list[Outcome]]:
    """Does each job with `world` processes and a fresh trainer; outcomes by job and rank."""
    for config, _ in jobs:
        resolve_model(config.model)
    port = free_port()
    (folder / "jobs.pkl").write_bytes(pickle.dumps(jobs))
    processes.start_processes(_rank, args=(world, port, str(folder)), nprocs=world, start_method=METHOD)
    by_rank = [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(world)]
    return [_measured([outcomes[job] for outcomes in by_rank]) for job in range(len(jobs))]


def run_alone(job: Job) -> Outcome:
    """The same job in this process, without a process group."""
    torch.set_num_threads(1)
    worker = TrainerWorker(job[0], resolve_model(job[0].model), 0, "trainer-0")
    (found,) = _measured([_train(worker, job)])
    return found


def _measured(by_rank: list[Outcome]) -> list[Outcome]:
    """Adds what the controller makes of the ranks' statistics, to each of them."""
    stats = [merged(of_update) for of_update in zip(*(outcome.pop("stats") for outcome in by_rank), strict=True)]
    whole = {"metrics": [s.metrics for s in stats], "kept": [s.kept for s in stats]}
    return [outcome | whole for outcome in by_rank]


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    jobs = pickle.loads((Path(folder) / "jobs.pkl").read_bytes())
    for job in jobs:
        worker = TrainerWorker(job[0], resolve_model(job[0].model), rank, f"trainer-{rank}")
        if not outcomes:
            join(rank, world, "127.0.0.1", port, timeout=240.0)
        outcomes.append(_train(worker, job))
    (Path(folder) / f"rank{rank}.pkl").write_bytes(pickle.dumps(outcomes))
    leave()


def _train(worker: TrainerWorker, job: Job) -> Outcome:
    config, batches = job
    info, stats, counted = worker.load(), [], []
    owners = Assignment(worker.world.size, info["ranks_per_replica"], by_group=worker.world.by_group)
    updates = config.trainer.updates_per_batch
    if config.rollout.true_cfg_scale > 1:
        worker.update.set_negatives(rig.Sampler(config).negatives())
    for step, batch in enumerate(batches):
        size = len(batch) // updates
        parts = [_owned(owners, batch[start : start + size], config) for start in range(0, len(batch), size)]
        for handed in parts[1:]:
            for meta, tickets in handed:
                worker.update.proximal(*_for_rank(worker, TrainRequest(step, (meta,)), tickets))
        for index, handed in enumerate(parts):
            plan = rig.StepPlan(rows=rig.rows(handed), update=index)
            stats.append(_step(worker, step, handed, plan))
            counted.append(len(stats[-1].parts))
    return {
        "info": info,
        "digest": rig.digest(worker),
        "tensors": rig.weights(worker),
        "average": rig.weights(worker, average=worker.versions.ema is not None),
        "retained": {version: flat.numel() for version, flat in worker.versions.retained.items()},
        "stats": stats,
        "parts": counted,
        "fetched": [each.fetched for each in stats],
        "sharded": sum(hasattr(p, "to_local") for p in worker.policy.transformer.parameters()),
    }


def _owned(owners: Assignment, batch: list[rig.Handed], config: Config) -> list[rig.Handed]:
    """One optimizer step's groups with the owners that the controller would give them."""
    owners.begin(len(batch))
    batch = rig.recut(config, batch)
    sizes = [[len(part) for part in meta.parts] for meta, _ in batch]
    return [(replace(meta, owners=owners.assign(own)), t) for (meta, t), own in zip(batch, sizes, strict=True)]


def _for_rank(worker: TrainerWorker, request: TrainRequest, tickets: Sequence[Any]) -> tuple[Any, ...]:
    """The request as the controller sends it to this rank, and of the groups' tickets those that go with it."""
    which = tickets_for(request.metas, worker.world)
    starts = accumulate((meta.tickets for meta in request.metas), initial=0)
    own = [tickets[start + place] for start, places in zip(starts, which, strict=False) for place in places]
    return replace(request, tickets=which), *own


def _with_means(worker: TrainerWorker, step: int, handed: list[rig.Handed]) -> list[rig.Handed]:
    """The groups with the means that the loss needs, of the sums that each rank has computed for its own parts."""
    if not hasattr(worker.algorithm, "group_terms"):
        return handed
    own: GroupSums = {}
    for meta, tickets in handed:
        if any(owner in worker.world.replica for owner in meta.owners):
            own = worker.update.group_sums(*_for_rank(worker, TrainRequest(step, (meta,)), tickets))
    by_rank: list[Any] = [own]
    if worker.world.size > 1:
        by_rank *= worker.world.size
        dist.all_gather_object(by_rank, own)
    sums = {part: of for rank in by_rank for part, of in rank.items()}
    return [(with_means(meta, sums), tickets) for meta, tickets in handed]


def _step(worker: TrainerWorker, step: int, handed: list[rig.Handed], plan: rig.StepPlan) -> UpdateStats:
    """As the controller does: a few groups a call to the replicas that train them, and once more where the sum does not
    fit. Every rank hears at the end of all groups, and gets the probe."""
    planned = tuple((meta.group, len(meta.owners)) for meta, _ in handed)
    handed = _with_means(worker, step, handed)
    turn = step % len(handed)  # Groups come in another order with every step.
    coming = [*handed[turn:], *handed[:turn]]
    mine = [(meta, t) for meta, t in coming if any(owner in worker.world.replica for owner in meta.owners)]
    lowest, its_tickets = min(handed, key=lambda group: group[0].group)
    first = tickets_of(lowest, [0])
    while True:
        worker.update.begin(step, plan)
        for start in range(0, len(mine), 3):
            call = sorted(mine[start : start + 3], key=lambda group: group[0].group)
            request = TrainRequest(step, tuple(meta for meta, _ in call))
            worker.train(*_for_rank(worker, request, [t for _, own in call for t in own]))
        end = TrainRequest(step, (), planned=planned, probe=lowest, probe_tickets=first)
        if worker.add_up(end, *[its_tickets[place] for place in first]) is None:
            return worker.take_step()


def lets_its_neighbour_wait(rank: int, port: int, folder: str, seconds: float) -> None:
    """One of four ranks: the first of each replica waits for the second, which does not come, until its limit."""
    join(rank, 4, "127.0.0.1", port, timeout=seconds)
    group = replica_mesh(World(rank, 4, per_replica=2, joined=True), torch.device("cpu")).get_group()
    if rank % 2 == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            (Path(folder) / f"rank{rank}").write_text(str(error))
    while len(list(Path(folder).glob("rank*"))) < 2:
        time.sleep(0.1)
