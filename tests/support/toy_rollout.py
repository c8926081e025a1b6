"""ToyRollout, the rollout worker's model of toy runs (toy.py), with a real Receiver."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from async_flowrl.config.schema import FULL, Config
from async_flowrl.seeds import generator
from async_flowrl.types import EMA, EVALUATION, POLICY, RolloutReport, RolloutRequest, Trajectory
from checkpoint_engine import EVALUATION as EVALUATION_SLOT
from checkpoint_engine import RING, Receiver, binding_probe
from tests.support.live import live_digest
from tests.support.toy_weights import LORA, SIZE, toy_lora, toy_tensors


class ToyRollout:
    """Makes images [1, 1, SIZE] whose bytes are computed from the live weights and the image's noise."""

    receiver: Receiver

    def __init__(self, config: Config, index: int, name: str) -> None:
        self.config, self.name = config, name
        self.tensors = toy_tensors(config.seed)
        self.watermarks: list[tuple[int, str, str]] = []
        """Per ticket: (version of the request, digest reported, digest of the live bytes at the end)."""
        self.batches: list[tuple[int, ...]] = []
        """Per batch of several tickets: their numbers, in order."""

    def load(self) -> dict[str, str]:
        """Makes the receiver, without which no other method works."""
        streams = (POLICY,) if self.config.trainer.ema_decay is None else (POLICY, EMA)
        lora: Mapping[str, Any] = {} if self.config.tune == FULL else LORA
        self.receiver = Receiver(self.tensors, streams=streams, capacity=self.config.max_staleness + 1, **lora)
        return {"base_digest": "toy"}

    def prove(self, version: int) -> Any:
        self.receiver.activate("policy", version)
        return binding_probe(toy_lora(self.tensors))

    def _made(self, request: RolloutRequest) -> tuple[RolloutReport, Any, Trajectory | None]:
        evaluated = request.kind == EVALUATION
        stream, slot = (self.receiver.streams[-1], EVALUATION_SLOT) if evaluated else (POLICY, RING)
        digest = self.receiver.activate(stream, request.version, slot=slot)
        a, b = (self.tensors[f"layer.lora_{x}.weight"] for x in "AB")
        noise = torch.stack([torch.randn(SIZE, generator=generator(s)) for s in request.initial_seeds])
        values = noise + 2.0 * noise @ a.T @ b.T
        images = (torch.sigmoid(values) * 255).to(torch.uint8).numpy().reshape(len(values), 1, 1, SIZE)
        trajectory = Trajectory(values.numpy(), (0, 1), (0,), values[:, :1].numpy(), np.zeros(2, np.float32), {})
        self.watermarks.append((request.version, digest, live_digest(self.receiver)))
        report = RolloutReport(request.ordinal, request.version, digest, len(images), ())
        return report, images, None if request.kind == EVALUATION else trajectory

    def generate(self, requests: Sequence[RolloutRequest]) -> tuple[Any, ...]:
        """Makes a batch in which each ticket's latents depend on the other tickets, much more than in a real batch."""
        if len(requests) == 1:
            report, *payload = self._made(requests[0])
            return [report], *payload
        self.batches.append(tuple(request.ordinal for request in requests))
        company = np.float32(sum((place + 1) * request.ordinal for place, request in enumerate(requests)) % 97)
        made = [self._made(request) for request in requests]
        payloads = [
            part
            for _, images, trajectory in made
            for part in (images, trajectory and replace(trajectory, latents=trajectory.latents + company / 97))
        ]
        return [report for report, _, _ in made], *payloads
