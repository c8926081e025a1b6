"""The controller stays responsive with 256 rollout workers: what one turn of its event loop costs, in CPU time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.toy
from async_flowrl.config.schema import Config
from async_flowrl.types import RolloutReport, RolloutRequest, Trajectory
from checkpoint_engine import CANARY_VERSION, RING, Ack, Header, binding_probe, canary_tensors
from tests.support.toy import toy_config, toy_run
from tests.support.toy_models import ToyRollout, toy_lora
from tests.support.toy_pool import Timing

WORKERS = 256
LIMIT = 0.1
"""Seconds of CPU that 99 of 100 turns of the loop stay below."""


class FakeRollout(ToyRollout):
    """Answers at once and computes nothing: what is left is the controller."""

    digests: dict[tuple[int, str], str]
    proof: dict[str, torch.Tensor] | None = None

    def __init__(self, config: Config, index: int, name: str) -> None:
        self.config, self.name, self.digests = config, name, {}
        self.trajectory = Trajectory(np.zeros((4, 8), np.float32), (0, 1), (0,), np.zeros((4, 1)), np.zeros(2), {})

    def load(self) -> dict[str, str]:
        return {"base_digest": "toy"}

    def receive(self, header: Header, buffer: Any, slot: str = RING) -> Ack:
        self.digests[header.version, slot] = header.digest
        self.layout, self.payload = header.layout, buffer
        return Ack(header.stream, header.version, header.digest, slot)

    def relay(self, header: Header, slot: str) -> tuple[None, Any]:
        return None, self.payload

    def prove(self, version: int) -> Any:
        assert version == CANARY_VERSION
        if FakeRollout.proof is None:
            FakeRollout.proof = binding_probe(toy_lora(canary_tensors(self.layout, 1)))
        return FakeRollout.proof

    def generate(self, request: RolloutRequest) -> tuple[RolloutReport, Any, Trajectory | None]:
        digest = self.digests[request.version, RING]
        images = np.zeros((len(request.images), 1, 1, 8), np.uint8)
        images[:, 0, 0, 0] = range(len(images))
        return RolloutReport(request.ordinal, request.version, digest, len(images), ()), images, self.trajectory


async def turns(costs: list[float]) -> None:
    """CPU seconds of this thread from one turn of the loop to the next."""
    before = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        costs.append(now - before)
        before = now


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
def test_a_turn_of_the_loop_is_short_with_256_workers(
    hand_over: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """`pytest --junitxml` records the figures."""
    torch.set_num_threads(1)
    monkeypatch.setattr(tests.support.toy, "ToyRollout", FakeRollout)
    timing = Timing(generate=0.1, score=0.0, update=0.0, transfer=0.0)
    config = toy_config(
        1, hand_over=hand_over, steps=4, prompts_per_step=WORKERS, rollout__num_workers=WORKERS, reward__num_workers=16
    )
    costs: list[float] = []

    async def measured() -> None:
        probe = asyncio.create_task(turns(costs))
        found = await toy_run(config, timing)
        probe.cancel()
        assert len(found.observer.of("version", state="acknowledged")) == WORKERS * 5
        assert len(found.lines) == 4

    asyncio.run(measured())
    ordered = sorted(costs)
    p99 = ordered[int(0.99 * len(ordered))]
    record_property("milliseconds of CPU per turn: p99, longest", (p99 * 1e3, ordered[-1] * 1e3))
    assert p99 < LIMIT, f"{len(costs)} turns: p99 {p99 * 1e3:.1f} ms, longest {ordered[-1] * 1e3:.1f} ms of CPU"
