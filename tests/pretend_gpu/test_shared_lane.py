"""A process that samples and trains, on a GPU: what takes no turn waits for nothing that a ticket has queued."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from pretended.report import RACE, forget, seen
from torch import Tensor

from async_flowrl.policies.registry import resolve_model
from async_flowrl.shared.shared_worker import SharedWorker, TrainingLane
from async_flowrl.training.messages import StepPlan, TrainRequest
from tests.support import trainer_rig as rig
from tests.support.tiny import request

STEPS = 3


def loaded() -> SharedWorker:
    config = rig.tiny_config()
    config.placement, config.model.tiny.layers = "shared", 1
    config.algorithm.kl_probe_images = 0  # A step whose KL is measured waits for the ticket.
    worker = SharedWorker(config, resolve_model(config.model), 0, "shared-0")
    in_a_thread(worker.rollout.load)
    worker.trainer.load()
    worker.trainer.sender.stage(0)
    assert worker.rollout.keep_local(worker.trainer.sender.policy.seal(0)) is not None
    return worker


def in_a_thread(work: Callable[[], Any]) -> None:
    """Runs it in another thread, whose work the device tells from this one's; raises its error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@contextmanager
def ticket_under_way(worker: SharedWorker) -> Iterator[Tensor]:
    """A ticket has its turn, and has queued a write to the tensor, for which nobody has waited."""
    entered, done = threading.Event(), threading.Event()
    written = torch.zeros(64, device=worker.trainer.device)

    def sample() -> None:
        with worker.rollout.turns.sampling():
            written.fill_(1.0)
            entered.set()
            done.wait(60)

    thread = threading.Thread(target=sample)
    thread.start()
    assert entered.wait(60)
    try:
        yield written
    finally:
        done.set()
        thread.join()


def waited_for(written: Tensor) -> bool:
    """Whether the host has waited for the ticket: if not, writing there from another stream races with it."""
    assert seen(RACE) == {}
    with torch.cuda.stream(torch.cuda.Stream()):
        written.add_(1.0)
    raced = bool(seen(RACE))
    torch.cuda.synchronize()
    forget()
    return not raced


def steps(worker: SharedWorker) -> list[str]:
    """Some steps of a rank of several, each of whose ends comes while a ticket is under way; returns the weights."""
    digests, sampler = [], rig.Sampler(worker.trainer.config)
    for step in range(STEPS):
        handed = [sampler.group(0, index) for index in (0, 1)]
        metas = tuple(meta for meta, _ in handed)
        trajectories = [one for _, each in handed for one in each]
        plan = StepPlan(rows=rig.rows(handed))
        worker.trainer.train(TrainRequest(step, metas, plan), *trajectories)
        with ticket_under_way(worker) as written:
            worker.trainer.add_up(TrainRequest(step, ()))
            worker.trainer.take_step()
            worker.trainer.sender.stage(step + 1)
            assert not waited_for(written), f"step {step} waited for the ticket"
        header = worker.trainer.sender.policy.seal(step + 1)
        in_a_thread(lambda header=header: worker.rollout.keep_local(header))  # type: ignore[misc]
        asked = replace(request(2), version=step + 1)
        in_a_thread(lambda asked=asked: worker.rollout.generate([asked]))  # type: ignore[misc]
        digests.append(worker.trainer.parameters.fingerprint())
    return digests


def test_the_end_of_a_step_waits_for_no_ticket_and_races_with_none() -> None:
    digests = steps(loaded())
    assert len(set(digests)) == STEPS
    assert seen(RACE) == {}


def test_a_version_of_its_own_is_kept_without_waiting_for_a_ticket() -> None:
    worker = loaded()
    header = worker.trainer.sender.policy.seal(0)
    with ticket_under_way(worker) as written:
        in_a_thread(lambda: worker.rollout.keep_local(header))
        assert not waited_for(written)


def test_on_the_stream_of_the_tickets_it_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLane, "beside", lambda lane: nullcontext())
    with pytest.raises(AssertionError, match="step 0 waited for the ticket"):
        steps(loaded())
    forget()
