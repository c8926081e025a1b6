"""Two processes that sample and train, on a pretended GPU each: the sum over both waits for no ticket of either.

At the end of each step each rank has a ticket under way, whose work is queued on its default stream.
"""

import multiprocessing
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from pretended.report import RACE, SYNC, Seen, seen, watched

from async_flowrl.config.schema import Config
from async_flowrl.controller.replicas import Assignment
from async_flowrl.policies.registry import resolve_model
from async_flowrl.shared.shared_worker import SharedWorker
from async_flowrl.training.messages import StepPlan, TrainRequest
from separation.rendezvous import join
from tests.pretend_gpu.test_shared_lane import in_a_thread, ticket_under_way, waited_for
from tests.support import trainer_rig as rig
from tests.support.ports import free_port
from tests.support.tiny import request
from tests.unit.training.trainer_ranks import _for_rank, _owned, run_alone

RANKS, STEPS, SECONDS = 2, 2, 240.0
Batches = list[list[rig.Handed]]


def tiny() -> Config:
    config = rig.tiny_config(num_workers=RANKS, micro_batch_size=2)
    config.placement, config.model.tiny.layers, config.rollout.num_workers = "shared", 1, RANKS
    config.algorithm.kl_probe_images = 0  # Nothing is measured here.
    return config


def joined(rank: int, port: int, config: Config) -> SharedWorker:
    """The worker of a rank, in the process group of all."""
    worker = SharedWorker(config, resolve_model(config.model), rank, f"shared-{rank}")
    in_a_thread(worker.rollout.load)
    join(rank, RANKS, "127.0.0.1", port, timeout=120.0)
    worker.trainer.load()
    return worker


def counted(waits: Counter[Seen]) -> int:
    """Waits of the host, but for the thread that copies the state beside the step."""
    return sum(count for one, count in waits.items() if "training/snapshots.py" not in one.where)


def one_rank(rank: int, port: int, config: Config, batches: Batches, ours: Connection) -> None:
    """Trains, and sends the parent after each step (weights' digest, whether it waited, waits for the device, header).

    The parent sends the header of the first rank back.
    """
    torch.set_num_threads(1)
    worker = joined(rank, port, config)
    owners = Assignment(RANKS, 1, by_group=False)
    for step, batch in enumerate(batches):
        handed = _owned(owners, batch, config)
        plan = StepPlan(rows=rig.rows(handed))
        call = TrainRequest(step, tuple(meta for meta, _ in handed), plan)
        worker.trainer.train(*_for_rank(worker.trainer, call, [t for _, own in handed for t in own]))
        planned = tuple((meta.group, len(meta.owners)) for meta, _ in handed)
        with ticket_under_way(worker) as written:
            with watched(SYNC) as waits:
                worker.trainer.add_up(TrainRequest(step, (), planned=planned))
                worker.trainer.take_step()
                if rank == 0:
                    worker.trainer.sender.stage(step + 1)
            waited = waited_for(written)
        header = worker.trainer.sender.policy.seal(step + 1) if rank == 0 else None
        ours.send((rig.digest(worker.trainer), waited, counted(waits), header))
        header = ours.recv()

        def keep_and_sample(header: Any = header, version: int = step + 1) -> None:
            assert worker.rollout.keep_local(header) is not None
            worker.rollout.generate([replace(request(2), version=version)])

        in_a_thread(keep_and_sample)
    ours.send(dict(seen(RACE)))


def run(batches: Batches, config: Config) -> list[list[Any]]:
    """What each rank has sent: one tuple per step, then its races."""
    context = multiprocessing.get_context("spawn")
    port, pipes, processes = free_port(), [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
            patch.delenv("PRETEND_SHARED_DEVICE", raising=False)
            arguments = (rank, port, config, batches, theirs)
            process = context.Process(target=one_rank, args=arguments, daemon=True)
            process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        told: list[list[Any]] = [[] for _ in pipes]
        for _ in batches:
            for pipe, own in zip(pipes, told, strict=True):
                assert pipe.poll(SECONDS), "a rank hangs"
                own.append(pipe.recv())
            for pipe in pipes:
                pipe.send(told[0][-1][3])
        for pipe, own in zip(pipes, told, strict=True):
            assert pipe.poll(SECONDS), "a rank hangs"
            own.append(pipe.recv())
        return told
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def batches() -> Batches:
    sampler = rig.Sampler(tiny())
    return [[sampler.group(0, 2 * step + index) for index in (0, 1)] for step in range(STEPS)]


def test_the_sum_over_two_ranks_waits_for_no_ticket_and_makes_the_weights_of_one(batches: Batches) -> None:
    """The digests are compared with those of a single trainer rank in a process that does not sample."""
    config = tiny()
    told = run(batches, config)
    alone = run_alone((config, batches))["digest"]
    for rank, (*steps, races) in enumerate(told):
        assert races == {}, f"rank {rank}"
        assert [waited for _, waited, _, _ in steps] == [False] * STEPS, f"rank {rank} waited for its ticket"
        assert steps[-1][0] == alone
        # The host waits for the sum's account, the norm, the weights' fingerprint, and the end of each call.
        assert max(waits for _, _, waits, _ in steps) <= 12
