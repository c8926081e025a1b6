"""Tests of the state of a real trainer rank that the controller keeps: from it another process goes on, bit for bit."""

import pickle
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.training.checkpoint import held_in
from async_flowrl.training.snapshots import Snapshots
from async_flowrl.types import EMA, POLICY
from tests.support import trainer_rig as rig

GROUPS = 2


def averaged() -> Config:
    """Three averages, a renewed reference, K + 1 = 3 versions, an exponent of the sums that is not the usual one."""
    config = rig.tiny_config(ema_decay=0.9, ema_every=1)
    config.max_staleness = 2
    config.algorithm.name, config.algorithm.sde_type, config.algorithm.old_policy_decay = "crd", "ode", "slow"
    config.algorithm.anchor, config.algorithm.average_decay = "average", "rising"
    config.algorithm.kl_coef, config.algorithm.reference_every = 10.0, 2
    return config


def batches(config: Config, steps: int) -> list[list[rig.Handed]]:
    sampler = rig.Sampler(config)
    return [[sampler.group(step, group) for group in range(GROUPS)] for step in range(steps)]


def test_another_process_goes_on_from_a_kept_state_with_the_same_bits() -> None:
    config = averaged()
    given = batches(config, 3)
    one, other = rig.trainer(config), rig.trainer(config)
    one.update.exponent += 3
    for step in (0, 1):
        rig.update(one, step, given[step])
    one.versions.keep(EMA, 2)
    one.versions.keep(POLICY, 1)
    digest, state = one.kept_state(2)
    checkpoint = state.checkpoint()
    held = held_in(checkpoint)
    assert {"weights", "optimizer", "ema", "sampling", "average", "reference", "retained"} <= checkpoint.tensors.keys()
    assert state.held_versions() == held.keys() == {(EMA, 2), (POLICY, 1)}
    assert other.take_over(digest, state, list(held)) == one.parameters.fingerprint()
    assert other.update.exponent == one.update.exponent
    for stream, version in held:
        assert torch.equal(sendable(one, stream, version), sendable(other, stream, version))
    forgetful = rig.trainer(config)
    forgetful.take_over(digest, state, [(EMA, 2), (EMA, 1)])
    assert forgetful.versions.kept.keys() == {(EMA, 2)}
    late = [(replace(meta, version=2, age=0), tickets) for meta, tickets in given[2]]
    metrics = [rig.update(worker, 2, late).metrics for worker in (one, other)]
    assert metrics[0] == metrics[1] and one.parameters.fingerprint() == other.parameters.fingerprint()
    assert one.kept_state(3)[0] != digest
    again = [worker.kept_state(3) for worker in (one, other)]
    assert again[0][0] == again[1][0]


def sendable(worker: Any, stream: str, version: int) -> Tensor:
    flat = worker.versions.sendable(stream, version)
    assert flat is not None
    return flat


def test_a_state_with_another_digest_is_refused_and_nothing_of_it_taken() -> None:
    one, other = rig.trainer(rig.tiny_config()), rig.trainer(rig.tiny_config())
    rig.update(one, 0, batches(rig.tiny_config(), 1)[0])
    digest, state = one.kept_state(1)
    before, damaged = other.parameters.fingerprint(), state.copied()
    damaged.data[0] ^= 1
    with pytest.raises(RuntimeError, match=damaged.digest()):
        other.take_over(digest, damaged)
    assert other.parameters.fingerprint() == before and other.versions.newest == 0
    other.take_over(digest, state)
    assert other.parameters.fingerprint() == one.parameters.fingerprint()


def test_the_bytes_of_a_state_are_no_part_of_its_pickle() -> None:
    """Bytes within a pickle are copied under Python's global lock, for which the thread that trains then waits."""
    worker = rig.trainer(rig.tiny_config())
    _, state = worker.kept_state(worker.snapshot())
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(state, protocol=5, buffer_callback=buffers.append)
    assert [buffer.raw().nbytes for buffer in buffers] == [state.data.nbytes]
    assert len(pickled) < state.data.nbytes / 20


def test_the_next_optimizer_step_waits_for_the_copy_and_its_gradients_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of version 1 is held up until the gradients of step 1 are there; it has none of step 1 in it."""
    config = rig.tiny_config()
    given, worker = batches(config, 2), rig.trainer(config)
    copied, goes_on = Snapshots.tensors, threading.Event()

    def slowly(state: Snapshots) -> Any:
        assert goes_on.wait(60.0)
        return copied(state)

    monkeypatch.setattr(Snapshots, "tensors", slowly)
    rig.update(worker, 0, given[0])
    weights = worker.parameters.fingerprint()
    worker.update.begin(1, rig.StepPlan(rows=rig.rows(given[1])))
    for meta, tickets in given[1]:
        worker.update.accumulate([meta], *tickets)
    worker.update.add_up(rig.TrainRequest(1, ()))
    assert worker.parameters.fingerprint() == weights
    threading.Timer(0.3, goes_on.set).start()
    spans = [span.name for span in worker.take_step().spans]
    assert spans[0] == "wait_snapshot" and worker.parameters.fingerprint() != weights
    other = rig.trainer(config)
    other.take_over(*worker.kept_state(1))
    assert other.parameters.fingerprint() == weights
