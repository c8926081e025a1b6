"""Tests of a process that samples and trains: one base in memory, the results of two processes, own versions."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import FULL, Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.shared.shared_worker import SharedStreams, SharedWorker
from async_flowrl.training.messages import StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.rank_model import base_tensors
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.types import RolloutReport
from checkpoint_engine.errors import WeightsMismatch
from tests.support import trainer_rig as rig
from tests.support.live import live_digest
from tests.support.tiny import request
from tests.support.until import until

LIMIT = 60.0
"""Seconds after which a thread that has not ended hangs."""


def shared_config(**changes: Any) -> Config:
    config = rig.tiny_config()
    config.placement, config.model.dtype, config.model.tiny.layers = "shared", "float32", 1
    for key, value in changes.items():
        setattr(config, key, value)
    return config


def worker(config: Config, *, first: str = "rollout") -> SharedWorker:
    one = SharedWorker(config, resolve_model(config.model), 0, "shared-0")
    for side in (first, "trainer" if first == "rollout" else "rollout"):
        getattr(one, side).load()
    return one


def bases(one: SharedWorker) -> list[dict[str, torch.Tensor]]:
    """The base that it samples with, and the one that it trains on."""
    return [base_tensors(policy.transformer) for policy in (one.rollout.engine.policy, one.trainer.policy)]


@pytest.mark.extended
@pytest.mark.parametrize("first", ["rollout", "trainer"])
def test_one_base_is_in_memory(first: str) -> None:
    loaded = worker(shared_config(), first=first)
    sampling, training = bases(loaded)
    assert sampling.keys() == training.keys() and len(sampling) > 20
    assert all(training[name].data_ptr() == tensor.data_ptr() for name, tensor in sampling.items())
    adapters = [
        loaded.rollout.engine.live_tensors(),
        loaded.trainer.parameters.named(loaded.trainer.parameters.values.data),
    ]
    pointers = [{tensor.data_ptr() for tensor in adapter.values()} for adapter in adapters]
    assert not pointers[0] & pointers[1], "each side has an adapter of its own"
    assert not any(tensor.requires_grad for tensor in sampling.values())


def test_whole_weights_that_are_trained_are_not_sampled_with() -> None:
    one = worker(shared_config(tune=FULL, max_staleness=0))
    sampling, training = bases(one)
    assert all(training[name].data_ptr() != tensor.data_ptr() for name, tensor in sampling.items())
    assert all(torch.equal(training[name], tensor) for name, tensor in sampling.items())


def test_it_keeps_the_versions_that_it_makes() -> None:
    one = worker(shared_config())
    assert isinstance(one.trainer.sender, SharedStreams)
    one.trainer.sender.stage(0)
    header = one.trainer.sender.policy.seal(0)
    assert one.rollout.keep_local(replace(header, version=7)) is None, "that one it has not made"
    ack = one.rollout.keep_local(header)
    assert ack is not None and (ack.version, ack.digest) == (0, header.digest)
    one.rollout.receiver.activate("policy", 0)
    assert live_digest(one.rollout.receiver) == header.digest
    one.trainer.versions.of(0)[3] += 1.0
    with pytest.raises(WeightsMismatch, match="trainer-0 made other weights of version 0 than the first rank"):
        one.rollout.keep_local(header, "evaluation")


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def keep(one: SharedWorker, version: int) -> None:
    """Has the rollout worker keep a version that the trainer rank retains."""
    one.trainer.sender.stage(version)
    assert one.rollout.keep_local(one.trainer.sender.policy.seal(version)) is not None


def test_versions_are_exchanged_only_in_the_turn_of_a_ticket() -> None:
    """Not while a unit of training has its turn, nor inside another ticket; the report says that it was a swap."""
    one, reports = worker(shared_config()), list[RolloutReport]()
    keep(one, 0)
    one.trainer.parameters.values.data.add_(0.01)
    one.trainer.versions.retain(1)

    def sample(version: int) -> None:
        reports.append(one.rollout.generate([replace(request(2), version=version)])[0][0])

    def live() -> tuple[int, str]:
        active = one.rollout.receiver.active
        assert active is not None
        return active.version, live_digest(one.rollout.receiver)

    sample(0)
    older = live()
    with one.rollout.turns.sampling():
        keep(one, 1)  # It arrives beside a ticket.
        assert live() == older
    with one.trainer.lane.turn():
        ticket = in_a_thread(lambda: sample(1))
        ticket.join(0.3)
        assert ticket.is_alive() and live() == older
    ticket.join(LIMIT)
    assert live()[0] == 1 and live()[1] != older[1]
    sample(0)
    assert live() == older
    assert [(report.version, report.swaps) for report in reports] == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("measured", [False, True])
def test_the_end_of_a_step_waits_for_no_ticket_but_a_unit_of_training_does(measured: bool) -> None:
    """A rank of several adds up and steps in two calls of their own, and stages the version.

    A step whose KL is measured takes turns for that, and says how long it waited for them.
    """
    config, now = shared_config(), [100.0]
    config.algorithm.kl_probe_images = 2 if measured else 0
    one, ended = worker(config), list[UpdateStats]()
    one.rollout.turns.clock = lambda: now[0]
    sampler = rig.Sampler(config)
    sampler.load(rig.weights(one.trainer))
    handed = [sampler.group(0, group) for group in (0, 1)]
    calls = [
        (TrainRequest(0, (meta,), StepPlan(rows=rig.rows(handed)) if index == 0 else None), tickets)
        for index, (meta, tickets) in enumerate(handed)
    ]

    def end() -> None:
        one.trainer.add_up(TrainRequest(0, ()))
        ended.append(one.trainer.take_step())
        one.trainer.sender.stage(1)

    before = one.trainer.parameters.fingerprint()
    one.trainer.train(calls[0][0], *calls[0][1])
    with one.rollout.turns.sampling():
        unit = in_a_thread(lambda: one.trainer.train(calls[1][0], *calls[1][1]))
        unit.join(0.3)
        assert unit.is_alive(), "the ticket has the turn"
    unit.join(LIMIT)
    with one.rollout.turns.sampling():
        ends = in_a_thread(end)
        until(lambda: one.rollout.turns.waiting or not ends.is_alive())
        assert ends.is_alive() == measured, "the optimizer step waits for a ticket only to measure its KL"
        now[0] += 7.0
    for thread in (ends, unit):
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert ended[0].waited == 7.0 * measured
    assert ("kl_per_update" in ended[0].metrics) == measured
    assert one.trainer.versions.newest == 1 and one.trainer.parameters.fingerprint() != before


def config(*, compiled: bool) -> Config:
    """Tickets of four images, micro-batches of two."""
    made = shared_config()
    made.trainer.micro_batch_size, made.trainer.compile = 2, compiled
    made.model.tiny.family = "qwen_image_21"  # Its block has three quarters of the operations of Qwen-Image's.
    made.rollout.compile, made.rollout.num_inference_steps = compiled, 2
    return made


class Sampled(rig.Sampler):
    """Makes groups with the network that a worker samples with."""

    def __init__(self, config: Config, worker: RolloutWorker) -> None:
        self.config, self.engine = config, worker.engine  # type: ignore[assignment]

    def latents(self, step: int) -> Any:
        return np.stack([self.group(step, group)[1][0].latents for group in range(self.config.prompts_per_step)])


def trained(worker: TrainerWorker, handed: list[rig.Handed]) -> str:
    rig.update(worker, 0, handed)
    return worker.parameters.fingerprint()


@contextmanager
def own_compiler() -> Iterator[None]:
    """Context in which nothing is compiled yet, as on a node of its own: also the cache on disk is empty."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        yield


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_blocks_of_one_process_compute_what_those_of_two_do() -> None:
    given, plain = config(compiled=True), config(compiled=False)
    model, sampler = resolve_model(given.model), rig.Sampler(plain)
    handed = [sampler.group(0, group) for group in range(given.prompts_per_step)]
    with own_compiler():
        one = SharedWorker(given, model, 0, "shared-0")
        one.rollout.load()
        one.trainer.load()
        together = Sampled(given, one.rollout)
        before, digest, after = together.latents(0), trained(one.trainer, handed), together.latents(1)
    trainer, rollout = TrainerWorker(given, model, 0, "trainer-0"), RolloutWorker(given, model, 0, "rollout-0")
    with own_compiler():
        trainer.load()
        assert digest == trained(trainer, handed)
    with own_compiler():
        rollout.load()
        alone = Sampled(given, rollout)
        assert np.array_equal(before, alone.latents(0)) and np.array_equal(after, alone.latents(1))
    eager = TrainerWorker(plain, model, 0, "trainer-0")
    eager.load()
    assert digest != trained(eager, handed), "nothing was compiled: not even the last bits differ"
