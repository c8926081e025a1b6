"""Tests of the rollout worker: a ticket has the version that its label names, though newer weights arrive."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.rollout_worker import RolloutWorker, is_swap
from async_flowrl.types import EVALUATION, TRAIN, RolloutReport, RolloutRequest
from checkpoint_engine import EVALUATION as EVALUATION_SLOT
from checkpoint_engine import PROOF_VERSION, Activation, Draft, Publisher, Receiver
from tests.support.tiny import randomise, request
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import Timing


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


def active(stream: str, version: int, digest: str = "") -> Activation:
    return Activation(stream, version, digest or f"{stream} {version}")


@pytest.mark.parametrize(
    ("before", "now", "swap"),
    [
        (None, active("policy", 0), 0),
        (active("policy", PROOF_VERSION), active("policy", 0), 0),
        (active("policy", 3), active("policy", 3), 0),
        (active("policy", 3), active("policy", 4), 0),
        (active("policy", 3), active("policy", 5), 0),
        (active("policy", 4), active("policy", 3), 1),
        (active("policy", 4), active("ema", 4), 1),
        (active("ema", 4), active("policy", 5), 1),
        (active("ema", 4, "same"), active("policy", 4, "same"), 0),
    ],
)
def test_an_exchange_is_what_is_no_newer_version(before: Activation | None, now: Activation, swap: int) -> None:
    assert is_swap(before, now) == swap


IMAGES, STEPS = 3, 6
Made = tuple[RolloutReport, Any, Any]


class Counted:
    """A real worker on the tiny model; on the sync lane a newer version arrives in a denoising step of every ticket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = Config(max_staleness=1)
        self.worker = RolloutWorker(config, resolve_model(config.model), 0, "rollout-0")
        self.worker.load()
        assert isinstance(self.worker.engine, DiffusersEngine)
        self.policy = self.worker.engine.policy
        self.weights = {name: t.detach().clone() for name, t in self.worker.engine.live_tensors().items()}
        randomise(self.weights)
        self.publisher = Publisher(self.weights, alpha=config.lora.alpha, rank=config.lora.rank, retain=STEPS + 1)
        for version in range(STEPS + 1):
            self.publisher.stage(version)
            self.publisher.seal(version)
            for tensor in self.weights.values():
                tensor.mul_(1.2)
        self.steps = self.decoded = 0
        self.arrives: tuple[int, int] | None = None
        """Denoising step and version of what is on its way."""
        self._velocity, self._decode = self.policy.velocity, self.policy.decode
        monkeypatch.setattr(self.policy, "velocity", self.velocity)
        monkeypatch.setattr(self.policy, "decode", self.decode)

    def velocity(self, latents: torch.Tensor, *others: Any) -> torch.Tensor:
        if self.arrives is not None and self.arrives[0] == self.steps % STEPS:
            lane = threading.Thread(target=self.receive, args=(self.arrives[1],))
            lane.start()
            lane.join()
            self.arrives = None
        self.steps += 1
        return self._velocity(latents, *others)

    def decode(self, latents: torch.Tensor, resolution: int) -> Any:
        self.decoded += len(latents)
        return self._decode(latents, resolution)

    def receive(self, version: int) -> None:
        self.worker.receiver.receive(*self.publisher.payload(version))

    def make(self, version: int, *, arrives_in: int | None = None) -> Made:
        """One ticket; version + 1 arrives in this denoising step of it."""
        self.arrives = None if arrives_in is None else (arrives_in, version + 1)
        asked = request(IMAGES).__dict__ | {"version": version, "ordinal": version}
        (report,), images, trajectory = self.worker.generate([RolloutRequest(**asked)])
        return report, images, trajectory


def test_weights_that_arrive_in_a_denoising_step_cost_no_image_and_change_none(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    counted.receive(0)
    beside = [counted.make(version, arrives_in=version) for version in range(STEPS)]
    assert counted.worker.receiver.held()[-1][1] == STEPS, "nothing arrived"
    assert (counted.steps, counted.decoded) == (STEPS * STEPS, STEPS * IMAGES)
    assert sum(report.images for report, _, _ in beside) == STEPS * IMAGES
    counted.worker.receiver.clear()
    for version, (report, images, trajectory) in enumerate(beside):
        counted.receive(version)
        alone, expected, steps = counted.make(version)
        assert (report.version, report.digest) == (version, alone.digest)
        assert np.array_equal(images, expected) and np.array_equal(trajectory.latents, steps.latents)
    assert len({report.digest for report, _, _ in beside}) == STEPS


@pytest.mark.parametrize(("k", "hand_over"), [(1, "batch"), (1, "stream"), (3, "stream")])
def test_a_run_makes_every_ticket_once_however_many_deliveries_fall_into_it(k: int, hand_over: str) -> None:
    timing = Timing(seed=3, spread=0.9, transfer=0.8, slow={"rollout-1": 2.0})
    found = virtual(toy_config(k, hand_over=hand_over, steps=16, rollout__num_workers=3), timing)
    issued = set(range(found.table.issued))
    for state in ("RUNNING", "SCORING", "TRAINED"):
        assert Counter(event["ordinal"] for event in found.tickets(state)) == Counter(issued), state
    rollouts = found.groups["rollout"].everybody
    assert sum(worker.calls["generate"] for worker in rollouts) == len(issued), "tickets started"
    assert sum(len(worker.target.watermarks) for worker in rollouts) == len(issued), "tickets finished"
    assert (found.table.retried, found.table.duplicates) == (0, 0)
    assert arrivals_within_tickets(found) >= 4, "too few deliveries fell into a ticket to tell"


def arrivals_within_tickets(found: ToyRun) -> int:
    """How often a worker acknowledged a version while it was making a ticket."""
    busy: set[tuple[str, int]] = set()
    count = 0
    for event in found.observer.events:
        if event["event"] == "ticket" and event["state"] in ("RUNNING", "SCORING"):
            (busy.add if event["state"] == "RUNNING" else busy.discard)((event["worker"], event["ordinal"]))
        if event["event"] == "version" and event["state"] == "acknowledged":
            count += event["worker"] in {worker for worker, _ in busy}
    return count
