"""Tests of the rollout worker: a ticket has the version that its label names, though newer weights arrive."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from async_flowrl.config.schema import Config
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.types import EVALUATION, TRAIN, RolloutRequest
from checkpoint_engine import EVALUATION as EVALUATION_SLOT
from checkpoint_engine import Activation, Draft, Receiver
from tests.support.tiny import request


class Engine:
    """Reads the live weights at the beginning and at the end of a ticket; in between, something happens."""

    def __init__(self, weight: torch.Tensor, meanwhile: Callable[[], None]) -> None:
        self.weight, self.meanwhile = weight, meanwhile
        self.seen: list[tuple[float, float]] = []
        self.adopted: list[Activation] = []

    def adopt(self, active: Activation, export: Export) -> None:
        header, data = export()
        assert Activation(header.stream, header.version, header.digest) == active
        assert float(torch.from_numpy(data).view(torch.float32)[0]) == float(self.weight[0])
        self.adopted.append(active)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        before = float(self.weight[0])
        self.meanwhile()
        self.seen.append((before, float(self.weight[0])))
        return [Rollout(np.zeros((len(request.images), 1, 1, 3), np.uint8), None, ()) for request in requests]


def worker_with(k: int) -> tuple[RolloutWorker, Engine, dict[int, str]]:
    """Holds versions 0..k whose weights are their number; version k + 1 arrives in the middle of every ticket."""
    worker = RolloutWorker(Config(max_staleness=k), None, 0, "rollout-0")  # type: ignore[arg-type]
    weight = torch.zeros(64)
    worker.receiver = Receiver({"w": weight}, capacity=k + 1)
    digests: dict[int, str] = {}

    def deliver(version: int, slot: str = "ring") -> None:
        data = worker.receiver.layout.empty()
        data.view(torch.float32)[:] = float(version)
        draft = Draft("policy", version, worker.receiver.layout, alpha=None, rank=None)
        header = draft.sealed(draft.layout.digests(data.numpy()))
        digests[version] = worker.receiver.receive(header, data.numpy(), slot).digest

    for version in range(k + 1):
        deliver(version)
    deliver(40, EVALUATION_SLOT)
    engine = Engine(weight, lambda: deliver(k + 1))
    worker.engine = engine  # type: ignore[assignment]
    return worker, engine, digests


def made(worker: RolloutWorker, version: int, kind: str = TRAIN) -> Any:
    fields = request(2, kind=kind).__dict__ | {"version": version}
    return worker.generate([RolloutRequest(**fields)])[0][0]


def test_a_ticket_is_made_with_one_version_and_labelled_with_it() -> None:
    """Newer weights arrive in the middle of it and stay out of it."""
    worker, engine, digests = worker_with(1)
    report = made(worker, 1)
    assert engine.seen == [(1.0, 1.0)]
    assert ("policy", 2, "ring") in worker.receiver.held(), "nothing arrived meanwhile"
    assert (report.version, report.digest) == (1, digests[1])


def test_going_back_to_an_older_version_is_normal() -> None:
    worker, engine, digests = worker_with(3)
    assert [made(worker, version).digest for version in (3, 1, 2)] == [digests[3], digests[1], digests[2]]
    assert [seen[0] for seen in engine.seen] == [3.0, 1.0, 2.0]


def test_evaluation_has_its_own_slot_and_leaves_nothing_behind() -> None:
    worker, engine, digests = worker_with(1)
    assert made(worker, 40, EVALUATION).digest == digests[40]
    assert made(worker, 1).digest == digests[1]
    assert engine.seen == [(40.0, 40.0), (1.0, 1.0)]


def test_the_engine_is_told_the_version_of_every_ticket() -> None:
    """With the bytes it would need to make the version its own."""
    worker, engine, digests = worker_with(2)
    for version in (0, 2, 2):
        made(worker, version)
    assert engine.adopted == [Activation("policy", version, digests[version]) for version in (0, 2, 2)]
