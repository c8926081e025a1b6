"""The reference rollout engine: runs a diffusers network in its own denoising loop, in float32 outside the network."""

import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.config.schema import LoraConfig
from async_flowrl.observability.flops import Meter
from async_flowrl.policies.base import Policy
from async_flowrl.policies.tuning import LoraTuning, Tuning
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.rollout.text_encoder import Encoder, Offloaded, PolicyEncoder, Prompts
from async_flowrl.seeds import generator
from async_flowrl.tickets.request import asked_of
from async_flowrl.transfers import download, upload
from async_flowrl.types import TRAIN, Conditioning, EncoderInput, RolloutRequest, Span, Trajectory
from checkpoint_engine import Activation

ADAPTER = LoraTuning(LoraConfig())  # Default of `tuning`: names and probes of a LoRA do not depend on its rank.


@dataclass(frozen=True)
class _Chunk:
    """The denoised images of one chunk (n images of a request); all tensors are on the device."""

    final: Tensor  # [n, ...] Final latents.
    recorded: Tensor  # [n, P, ...] Latents at the recorded noise levels.
    log_probs: Tensor  # [n, W] Log-probs of the trained steps.
    finite: Tensor  # [] bool: True if all final latents are finite.


@dataclass(frozen=True)
class _Plan:
    """The data that all chunks of a request share."""

    request: RolloutRequest
    sigmas: Tensor  # [T+1] Noise levels, on the host.
    levels: Tensor  # [T+1] The same noise levels on the device.
    encoded: Conditioning  # The encoded prompt, on the host.
    positive: Mapping[str, Tensor]  # The encoded prompt on the device.
    negative: Mapping[str, Tensor] | None  # The encoded negative prompt on the device; None without guidance.
    noisy: frozenset[int]  # Denoising steps that add noise.
    points: tuple[int, ...]  # Indices of the noise levels whose latents are recorded.

    def shape(self, images: int) -> Hashable:
        """The key of one denoising step of so many images: steps with equal keys take equally many FLOPs."""
        return self.request.sampling, images, shapes_by_name(self.positive), shapes_by_name(self.negative or {})


class DiffusersEngine:
    """Denoises tickets in chunks of `batch_size` images (None: the whole ticket). Equal requests give equal bits.

    The noise of an image depends only on its seeds. On CUDA the host waits for the device twice per ticket.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch_size: int | None = None,
        device: str | torch.device = "cpu",
        text_encoder: str = "resident",
        tuning: Tuning = ADAPTER,
        encoder: Encoder | None = None,
    ) -> None:
        """`tuning` says which tensors are trained (default: an attached LoRA); `encoder` replaces the policy's text
        encoders.

        Raises ValueError for `text_encoder` "offload" without text encoders.
        """
        self.policy, self.batch_size, self.device = policy, batch_size, torch.device(device)
        self._tuning = tuning
        self._meter = Meter(policy.transformer)
        if encoder is None:
            offloaded = Offloaded(policy.text_encoders, self.device) if text_encoder == "offload" else None
            encoder = PolicyEncoder(policy, offloaded.visit if offloaded else nullcontext)
        self._prompts = Prompts(encoder)

    def encode(self, texts: Sequence[EncoderInput]) -> list[Conditioning]:
        return self._prompts.encode_negatives(texts)

    def live_tensors(self) -> Mapping[str, Tensor]:
        return self._tuning.parameters(self.policy.transformer)

    def adopt(self, active: Activation, export: Export) -> None:
        """Does nothing, because the receiver writes to the network's own tensors."""

    def probe(self) -> Mapping[str, Tensor]:
        return self._tuning.probe(self.policy.transformer)

    # not inference_mode: the trainer replays with the same kernels, and the LoRA's tensor views must stay ordinary.
    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Returns the images and, for a training request, the trajectory (without noisy steps, only its final latents).

        Raises ValueError for a request that contradicts itself, FloatingPointError if final latents are not finite.
        """
        begun = time.time()
        plan = self._plan(request)
        size = self.batch_size or len(request.images)
        parts = [range(start, min(start + size, len(request.images))) for start in range(0, len(request.images), size)]
        chunks = [self._denoise(plan, images) for images in parts]
        trajectory = self._finish(plan, chunks)
        denoised = time.time()
        decoded = [self.policy.decode(chunk.final, request.sampling.resolution) for chunk in chunks]
        images = download([torch.cat(decoded)], self.device)[0].numpy()
        generated = Span("generate", begun, denoised, self._flops(plan, parts))
        payload_bytes = None if trajectory is None else images.nbytes + trajectory.nbytes
        spans = (generated, Span("decode", denoised, time.time(), bytes=payload_bytes))
        return Rollout(images, trajectory, spans)

    def _flops(self, plan: _Plan, parts: Sequence[range]) -> int | None:
        by_part = [self._meter.flops(plan.shape(len(images))) for images in parts]
        counted = [flops for flops in by_part if flops is not None]
        return plan.request.sampling.num_inference_steps * sum(counted) if len(counted) == len(by_part) else None

    def _plan(self, request: RolloutRequest) -> _Plan:
        sampling, train = request.sampling, request.kind == TRAIN
        _check(request)
        encoded = self._prompts.embeddings(asked_of(request.prompt, sampling))
        branches = [self._uploaded(branch) for branch in encoded]
        sigmas = self.policy.sigmas(sampling.num_inference_steps, sampling.resolution)
        # Without noisy steps, the trainer needs only the final latents.
        recorded = {point for step in request.train_steps if request.noise_steps for point in (step, step + 1)}
        return _Plan(
            request,
            sigmas,
            upload(sigmas, self.device),
            encoded[0],
            branches[0],
            branches[1] if len(branches) > 1 else None,
            frozenset(request.noise_steps) if train else frozenset(),
            tuple(sorted(recorded or {sampling.num_inference_steps})) if train else (),
        )

    def _uploaded(self, encoded: Conditioning) -> dict[str, Tensor]:
        return {name: upload(torch.from_numpy(value), self.device) for name, value in encoded.items()}

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
        empty = latents.new_empty(len(images), 0)
        return _Chunk(
            latents,
            torch.stack([recorded[point] for point in plan.points], dim=1) if plan.points else empty,
            torch.stack(log_probs, dim=1) if log_probs else empty,
            latents.isfinite().all(),
        )

    def _step(
        self, plan: _Plan, step: int, latents: Tensor, sources: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the next latents [n, ...] and, if the step is noisy, their log-prob [n] float32."""
        sampling, n = plan.request.sampling, len(latents)
        sigma, sigma_next = (plan.levels[i].expand(n) for i in (step, step + 1))
        with self._meter.measure(plan.shape(n)):
            velocity = self.policy.velocity(latents, sigma, plan.positive, plan.negative, sampling)
        if step not in plan.noisy:
            return sde.ode_step(latents, velocity, sigma, sigma_next), None
        transition = sde.transition(
            latents,
            velocity,
            sigma,
            sigma_next,
            sigma_after_first=plan.levels[1],
            sde_type=sampling.sde_type,
            noise_level=sampling.noise_level,
        )
        following = sde.sample(transition, self._noise(sources, tuple(latents.shape[1:])))
        return following, sde.log_prob(following, transition, sampling.sde_type).float()

    def _noise(self, sources: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
        drawn = torch.empty(len(sources), *shape, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        for row, source in zip(drawn, sources, strict=True):
            torch.randn(shape, generator=source, out=row)
        return upload(drawn, self.device)

    def _finish(self, plan: _Plan, chunks: Sequence[_Chunk]) -> Trajectory | None:
        """Waits for the device and returns the trajectory, None for an evaluation. Raises FloatingPointError."""
        request = plan.request
        tensors = [torch.stack([chunk.finite for chunk in chunks])]
        if request.kind == TRAIN:
            tensors += [
                torch.cat([chunk.recorded for chunk in chunks]),
                torch.cat([chunk.log_probs for chunk in chunks]),
            ]
        finite, *recorded = download(tensors, self.device)
        if not bool(finite.all()):
            raise FloatingPointError(
                f"ticket {request.ordinal} (step {request.step}, group {request.group}) with policy version "
                f"{request.version}: the generated latents are not finite"
            )
        if request.kind != TRAIN:
            return None
        latents, log_probs = (tensor.numpy() for tensor in recorded)
        return Trajectory(
            latents=latents,
            points=plan.points,
            train_steps=request.train_steps,
            log_probs=log_probs,
            sigmas=plan.sigmas.numpy(),
            conditioning=dict(plan.encoded),
        )


def shapes_by_name(conditioning: Mapping[str, Tensor]) -> tuple[tuple[str, torch.Size], ...]:
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
