"""What each trainer process does in the tests of several ranks; a module of its own, so that it can be spawned."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes
import trainer_rig as rig
from torch import nn
from torch.distributed.fsdp import FSDPModule

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.training.messages import TrainRequest
from async_flowrl.training.worker import TrainerWorker
from separation.rendezvous import join, leave, rank_environment
from tests.support.ports import free_port

Job = tuple[Config, list[list[rig.Handed]]]
Outcome = dict[str, Any]
SAMPLED = ("behaviour_gap", "kl_per_update", "gradient_snr", "trust_region/")


def run_ranks(world: int, jobs: list[Job], folder: Path) -> list[list[Outcome]]:
    """Does each job with `world` processes and a fresh trainer; outcomes by job and rank."""
    for config, _ in jobs:
        resolve_model(config.model)
    port = free_port()
    (folder / "jobs.pkl").write_bytes(pickle.dumps(jobs))
    processes.spawn(_rank, args=(world, port, str(folder)), nprocs=world)
    by_rank = [pickle.loads((folder / f"rank{rank}.pkl").read_bytes()) for rank in range(world)]
    return [[outcomes[job] for outcomes in by_rank] for job in range(len(jobs))]


def run_alone(job: Job) -> Outcome:
    """The same job in this process, without a process group."""
    torch.set_num_threads(1)
    return _train(TrainerWorker(job[0], resolve_model(job[0].model), 0, "trainer-0"), job)


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    environment = rank_environment(rank=rank, world=world, address="127.0.0.1", port=port, timeout=240.0)
    outcomes: list[Outcome] = []
    for job in pickle.loads((Path(folder) / "jobs.pkl").read_bytes()):
        worker = TrainerWorker(job[0], resolve_model(job[0].model), rank, f"trainer-{rank}")
        if not outcomes:
            join(environment)
        outcomes.append(_train(worker, job))
    (Path(folder) / f"rank{rank}.pkl").write_bytes(pickle.dumps(outcomes))
    leave()


def _train(worker: TrainerWorker, job: Job) -> Outcome:
    config, batches = job
    info, stats = worker.load(), []
    updates = config.trainer.updates_per_batch
    for step, batch in enumerate(batches):
        size = len(batch) // updates
        for meta, tickets in batch[size:]:
            worker.update.proximal(TrainRequest(step, (meta,)), *tickets)
        for index in range(updates):
            part = batch[index * size : (index + 1) * size]
            stats.append(rig.update(worker, step, part, plan=rig.StepPlan(rows=rig.rows(part), update=index)))
    return {
        "info": info,
        "digest": worker.weights_digest(),
        "tensors": worker.tensors(),
        # Of the ranks' own first rows, or of smaller pieces of the gradient: samples, not means over all rows.
        "metrics": [{k: v for k, v in s.metrics.items() if not k.startswith(SAMPLED)} for s in stats],
        "sampled": [{k: v for k, v in s.metrics.items() if k.startswith(SAMPLED)} for s in stats],
        "kept": [s.kept for s in stats],
        "ahead": [_ahead(block) for block in worker.policy.blocks],
        "sharded": sum(hasattr(p, "to_local") for p in worker.policy.transformer.parameters()),
    }


def _ahead(block: nn.Module) -> tuple[int, int]:
    """How many blocks FSDP gathers ahead of this one, forward and backward."""
    if not isinstance(block, FSDPModule):
        return 0, 0
    state = block._get_fsdp_state()
    return len(state._states_to_forward_prefetch), len(state._states_to_backward_prefetch)
