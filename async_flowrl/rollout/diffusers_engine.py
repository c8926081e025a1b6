"""The reference rollout engine: a diffusers model denoised by our own loop, in float32 outside the network."""

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.observability.flops import Meter
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import lora_layers, lora_modules, lora_parameters
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.seeds import generator
from async_flowrl.types import TRAIN, ByteArray, Conditioning, RolloutRequest, Span, Trajectory, Wording
from checkpoint_engine import Activation, LoraModule, binding_probe

_CACHED_PROMPTS = 1024
"""Embeddings kept, least recently used out first; a negative prompt is used all the time and so stays."""


@dataclass(frozen=True)
class _Chunk:
    """Images start .. start + n of a request: final latents [n, ...], recorded points [n, P, ...], log-probs [n, W]."""

    final: Tensor
    recorded: Tensor
    log_probs: Tensor


@dataclass(frozen=True)
class _Plan:
    """What all chunks of a request share; `points` are the schedule positions whose latents are recorded."""

    request: RolloutRequest
    sigmas: Tensor
    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor] | None
    noisy: frozenset[int]
    points: tuple[int, ...]


class DiffusersEngine:
    """Denoises tickets in fixed chunks. The same request on the same weights gives the same bits.

    `batch_size` images go through the network at once (None: the whole ticket). An image's noise depends on its seeds
    alone; its chunk neighbours touch only the last float bits.
    """

    def __init__(self, policy: Policy, *, batch_size: int | None = None, device: str | torch.device = "cpu") -> None:
        self.policy, self.batch_size, self.device = policy, batch_size, torch.device(device)
        self._meter = Meter(policy.transformer)
        self._prompts: OrderedDict[tuple[Wording, str | None], dict[str, Tensor]] = OrderedDict()

    def encode(self, texts: Sequence[Wording]) -> list[Conditioning]:
        return self.policy.encode(texts)

    def lora_parameters(self) -> Mapping[str, Tensor]:
        return lora_parameters(self.policy.transformer)

    def adopt(self, active: Activation, export: Export) -> None:
        """Nothing to do: the receiver's live tensors are the network's own."""

    def probe(self) -> Mapping[str, Tensor]:
        layers = lora_layers(lora_modules(self.policy.transformer))
        return binding_probe({name: LoraModule(*parts) for name, parts in layers.items()})

    # no_grad, not inference_mode: the trainer replays with the same kernels, and views of the adapter stay ordinary.
    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Images and, for training requests, the trajectory; a request without `train_steps` records the final latents.

        Raises ValueError on a request that contradicts itself and FloatingPointError on latents that are not finite.
        """
        begun = time.time()
        plan = self._plan(request)
        size = self.batch_size or len(request.images)
        parts = [range(start, min(start + size, len(request.images))) for start in range(0, len(request.images), size)]
        shape = request.sampling, len(request.images), _shapes(plan.positive), _shapes(plan.negative or {})
        with self._meter.measure(shape):
            chunks = [self._denoise(plan, images) for images in parts]
        trajectory = self._trajectory(plan, chunks) if request.kind == TRAIN else None
        denoised = time.time()
        images = self._decode(chunks, request.sampling.resolution)
        generated = Span("generate", begun, denoised, self._meter.flops(shape))
        made = None if trajectory is None else images.nbytes + trajectory.nbytes
        spans = (generated, Span("decode", denoised, time.time(), bytes=made))
        return Rollout(images, trajectory, spans)

    def _plan(self, request: RolloutRequest) -> _Plan:
        sampling, train = request.sampling, request.kind == TRAIN
        _check(request)
        negative = None
        if sampling.true_cfg_scale > 1:
            negative = self._conditioning(request.prompt.negative_wording(sampling.negative_prompt), None)
        # Without noise there are no transitions to train on: the rows of train_steps are made from the final latents.
        recorded = {point for step in request.train_steps if request.noise_steps for point in (step, step + 1)}
        return _Plan(
            request,
            self.policy.sigmas(sampling.num_inference_steps, sampling.resolution),
            self._conditioning(request.prompt.wording, request.prompt.system),
            negative,
            frozenset(request.noise_steps) if train else frozenset(),
            tuple(sorted(recorded or {sampling.num_inference_steps})) if train else (),
        )

    def _conditioning(self, text: Wording, system: str | None) -> dict[str, Tensor]:
        key = text, system
        if key not in self._prompts:
            (encoded,) = self.policy.encode([text], system=system)
            self._prompts[key] = {name: torch.from_numpy(value).to(self.device) for name, value in encoded.items()}
            if len(self._prompts) > _CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        return self._prompts[key]

    def _denoise(self, plan: _Plan, images: range) -> _Chunk:
        request = plan.request
        shape = self.policy.latent_shape(request.sampling.resolution)
        latents = self._noise([generator(request.initial_seeds[i]) for i in images], shape)
        sources = [generator(request.noise_seeds[i]) for i in images]
        recorded = {0: latents} if 0 in plan.points else {}
        log_probs = []
        for step in range(request.sampling.num_inference_steps):
            latents, value = self._step(plan, step, latents, sources)
            if step + 1 in plan.points:
                recorded[step + 1] = latents
            if step in request.train_steps and value is not None:
                log_probs.append(value)
        if not bool(latents.isfinite().all()):
            raise FloatingPointError(
                f"ticket {request.ordinal} (step {request.step}, group {request.group}) with policy version "
                f"{request.version}: the generated latents are not finite"
            )
        empty = latents.new_empty(len(images), 0)
        return _Chunk(
            latents,
            torch.stack([recorded[point] for point in plan.points], dim=1) if plan.points else empty,
            torch.stack(log_probs, dim=1) if log_probs else empty,
        )

    def _step(
        self, plan: _Plan, step: int, latents: Tensor, sources: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor | None]:
        """The next latents, and their log-prob [n] float32 where the step is noisy."""
        sampling, n = plan.request.sampling, len(latents)
        sigma, sigma_next = (plan.sigmas[i].expand(n).to(self.device) for i in (step, step + 1))
        velocity = self.policy.velocity(latents, sigma, plan.positive, plan.negative, sampling)
        if step not in plan.noisy:
            return sde.ode_step(latents, velocity, sigma, sigma_next), None
        transition = sde.transition(
            latents,
            velocity,
            sigma,
            sigma_next,
            sigma_after_first=plan.sigmas[1].to(self.device),
            sde_type=sampling.sde_type,
            noise_level=sampling.noise_level,
        )
        following = sde.sample(transition, self._noise(sources, tuple(latents.shape[1:])))
        return following, sde.log_prob(following, transition, sampling.sde_type).float()

    def _noise(self, sources: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
        """Standard normal [n, ...] float32, row i from generator i."""
        return torch.stack([torch.randn(shape, generator=source) for source in sources]).to(self.device)

    def _trajectory(self, plan: _Plan, chunks: Sequence[_Chunk]) -> Trajectory:
        return Trajectory(
            latents=torch.cat([chunk.recorded for chunk in chunks]).cpu().numpy(),
            points=plan.points,
            train_steps=plan.request.train_steps,
            log_probs=torch.cat([chunk.log_probs for chunk in chunks]).cpu().numpy(),
            sigmas=plan.sigmas.numpy(),
            conditioning={name: value.cpu().numpy() for name, value in plan.positive.items()},
        )

    def _decode(self, chunks: Sequence[_Chunk], resolution: int) -> ByteArray:
        return np.concatenate([self.policy.decode(chunk.final, resolution) for chunk in chunks])


def _shapes(conditioning: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, tensor.shape) for name, tensor in sorted(conditioning.items()))


def _check(request: RolloutRequest) -> None:
    n, steps = len(request.images), request.sampling.num_inference_steps
    where = f"request of ticket {request.ordinal}"
    if n == 0 or len(request.initial_seeds) != n or len(request.noise_seeds) != n:
        counts = f"{n} images, {len(request.initial_seeds)} initial seeds, {len(request.noise_seeds)} noise seeds"
        raise ValueError(f"{where}: as many seeds as images and at least one, got {counts}")
    trainable = request.noise_steps or range(steps)
    if list(request.train_steps) != sorted(set(request.train_steps) & set(trainable)):
        raise ValueError(
            f"{where}: train_steps {request.train_steps} must be ascending and among noise_steps {request.noise_steps}"
        )
    if request.noise_steps and not 0 <= min(request.noise_steps) <= max(request.noise_steps) < steps:
        raise ValueError(f"{where}: noise_steps {request.noise_steps} must lie in 0..{steps - 1}")
