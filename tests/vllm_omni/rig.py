"""A rollout worker on the real vllm-omni, beside a diffusers model that plays the trainer."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from async_flowrl.config.schema import Config, LoraConfig, ModelConfig, RolloutConfig, TinyConfig
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.rollout.base import Rollout
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.rollout.vllm_omni.engine import VllmOmniEngine
from async_flowrl.seeds import derive, generator
from async_flowrl.types import RolloutRequest, Trajectory
from checkpoint_engine import Ack, Activation, Draft, Header
from checkpoint_engine.digest import ByteArray

TOLERANCE = 1e-5
"""float32; the two networks do the same sums in other orders."""


class Rig:
    """Version v of the adapter has random A and B drawn from v; `hold` puts it into the trainer's model."""

    def __init__(self, gpus_per_worker: float = 1.0, family: str = "qwen_image", heads: int = 8) -> None:
        torch.set_num_threads(1)
        # alpha / rank is no power of two, so that scaling B rounds.
        lora = LoraConfig(rank=8, alpha=12.0)
        self.config = Config(
            model=ModelConfig(dtype="float32", tiny=TinyConfig(family=family, heads=heads), max_sequence_length=64),
            lora=lora,
            rollout=RolloutConfig(engine="vllm_omni", gpus_per_worker=gpus_per_worker),
        )
        model = resolve_model(self.config.model)
        self.worker = RolloutWorker(self.config, model, 0, "rollout-0")
        self.base_digest = self.worker.load()["base_digest"]
        assert isinstance(self.worker.engine, VllmOmniEngine)
        self.engine: VllmOmniEngine = self.worker.engine
        self.policy = load_policy(model, dtype="float32", device="cpu", parts="all")
        add_lora(self.policy.transformer, lora, self.policy, seed=0)
        self.reference = DiffusersEngine(self.policy)

    def hold(self, version: int) -> Mapping[str, torch.Tensor]:
        parameters = lora_parameters(self.policy.transformer)
        with torch.no_grad():
            for name, parameter in parameters.items():
                drawn = torch.randn(parameter.shape, generator=generator(derive(version, name)))
                parameter.copy_(drawn * (0.3 if ".lora_B." in name else 0.125))
        return parameters

    def payload(self, version: int, *, alpha: float | None = None) -> tuple[Header, ByteArray]:
        layout = self.worker.receiver.layout
        buffer = layout.empty()
        for name, view in layout.views(buffer).items():
            view.copy_(self.hold(version)[name].detach())
        alpha = self.config.lora.alpha if alpha is None else alpha
        data = buffer.numpy()
        draft = Draft("policy", version, layout, alpha, self.config.lora.rank)
        return draft.sealed(layout.digests(data)), data

    def deliver(self, version: int) -> Ack:
        """As checkpoint_engine does, into the worker's receiver; it stays out of the engine until a ticket names it."""
        return self.worker.receiver.receive(*self.payload(version))

    def activation(self, header: Header) -> Activation:
        return Activation(header.stream, header.version, header.digest)

    def made(self, request: RolloutRequest, version: int) -> Rollout:
        """The engine's ticket on a version, without the worker's receiver between."""
        header, data = self.payload(version)
        self.engine.adopt(self.activation(header), lambda: (header, data))
        return self.engine.generate([replace(request, version=version)])[0]

    def expected(self, request: RolloutRequest, version: int) -> Rollout:
        self.hold(version)
        return self.reference.generate([replace(request, version=version)])[0]


def trajectory_of(rollout: Rollout) -> Trajectory:
    assert rollout.trajectory is not None
    return rollout.trajectory


def gap(one: Rollout, two: Rollout) -> float:
    """The largest difference of recorded latents and of log-probs."""
    a, b = trajectory_of(one), trajectory_of(two)
    assert a.points == b.points and a.log_probs.shape == b.log_probs.shape
    pairs = [(a.latents, b.latents), (a.log_probs, b.log_probs)]
    return max(float(np.abs(x - y).max()) for x, y in pairs if x.size)


def same(one: Rollout, two: Rollout) -> bool:
    return np.array_equal(one.images, two.images) and gap(one, two) == 0.0
