"""The reference rollout engine: runs a diffusers network in its own denoising loop, in float32 outside the network."""

import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.config.schema import LoraConfig
from async_flowrl.observability.flops import Meter, reserved_memory
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.tuning import LoraTuning, Tuning
from async_flowrl.rollout.base import Export, Rollout
from async_flowrl.rollout.text_encoder import Encoder, Offloaded, PolicyEncoder, Prompts
from async_flowrl.seeds import generator
from async_flowrl.tickets.request import asked_of
from async_flowrl.transfers import download, upload
from async_flowrl.types import TRAIN, ByteArray, Conditioning, EncoderInput, RolloutRequest, Span, Trajectory
from checkpoint_engine import Activation

ADAPTER = LoraTuning(LoraConfig())  # Default of `tuning`: names and probes of a LoRA do not depend on its rank.


@dataclass(frozen=True)
class _Plan:
    request: RolloutRequest
    sigmas: Tensor  # [T+1] Noise levels, on the host.
    levels: Tensor  # [T+1] The same noise levels on the device.
    encoded: Sequence[Conditioning]  # The encoded prompt and, with guidance, its negative prompt, on the host.
    positive: Mapping[str, Tensor]  # The encoded prompt on the device.
    negative: Mapping[str, Tensor] | None  # The encoded negative prompt on the device; None without guidance.
    noisy: frozenset[int]  # Denoising steps that add noise.
    points: tuple[int, ...]  # Indices of the noise levels whose latents are recorded.


@dataclass
class _Chunk:
    """Some images of one ticket (n) while they are denoised; all tensors are on the device."""

    plan: _Plan
    latents: Tensor  # [n, ...]
    sources: Sequence[torch.Generator]  # Of the noise of each image.
    recorded: list[Tensor]  # Latents [n, ...] at the noise levels `plan.points`, as far as they were reached.
    log_probs: list[Tensor]  # [n] of each trained step so far.


class DiffusersEngine:
    """Denoises tickets in chunks of `batch_size` images (None: the whole ticket). Equal batches give equal bits.

    The noise of an image depends only on its seeds. Several tickets go through the network together, in their order. On
    CUDA the host waits for the device twice per ticket.
    """

    def __init__(
        self,
        policy: PipelinePolicy,
        *,
        batch_size: int | None = None,
        device: str | torch.device = "cpu",
        text_encoder: str = "resident",
        tuning: Tuning = ADAPTER,
        encoder: Encoder | None = None,
    ) -> None:
        """`tuning` says what is trained (default: a LoRA); `encoder` replaces the policy's. Raises ValueError."""
        self.policy, self.batch_size, self.device = policy, batch_size, torch.device(device)
        self._tuning = tuning
        self._meter = Meter()
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
    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Returns each request's images and, for training, trajectory; the first has the spans of all.

        Raises ValueError for requests that contradict themselves or differ, FloatingPointError for latents that are not
        finite.
        """
        begun = time.time()
        check_alike(requests)
        plans = [self._plan(request) for request in requests]
        count = len(requests[0].images)
        size = self.batch_size or count
        parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
        by_ticket = list(zip(*[self.denoise(plans, part) for part in parts], strict=True))
        trajectories = [self._finish(plan, chunks) for plan, chunks in zip(plans, by_ticket, strict=True)]
        denoised = time.time()
        decoded = [self._decoded(chunks) for chunks in by_ticket]
        payload_bytes = None
        if requests[0].kind == TRAIN:
            payload_bytes = sum(images.nbytes for images in decoded) + sum(t.nbytes for t in trajectories if t)
        spans = (
            Span("generate", begun, denoised, self._flops(plans, parts)),
            Span("decode", denoised, time.time(), bytes=payload_bytes, memory=reserved_memory()),
        )
        made = zip(decoded, trajectories, strict=True)
        return [Rollout(*parts, () if place else spans) for place, parts in enumerate(made)]

    def _decoded(self, chunks: Sequence[_Chunk]) -> ByteArray:
        resolution = chunks[0].plan.request.sampling.resolution
        decoded = [self.policy.decode(chunk.latents, resolution) for chunk in chunks]
        images: ByteArray = download([torch.cat(decoded)], self.device)[0].numpy()
        return images

    def _flops(self, plans: Sequence[_Plan], parts: Sequence[range]) -> int | None:
        by_part = [self._meter.flops(_shapes(plans, len(images))) for images in parts]
        counted = [flops for flops in by_part if flops is not None]
        steps = plans[0].request.sampling.num_inference_steps
        return steps * sum(counted) if len(counted) == len(by_part) else None

    def _plan(self, request: RolloutRequest) -> _Plan:
        sampling, train = request.sampling, request.kind == TRAIN
        _check(request)
        encoded = self._prompts.embeddings(asked_of(request.prompt, sampling))
        branches = [{key: upload(torch.from_numpy(value), self.device) for key, value in of.items()} for of in encoded]
        sigmas = self.policy.sigmas(sampling.num_inference_steps, sampling.resolution)
        # Without noisy steps, the trainer needs only the final latents.
        recorded = {point for step in request.train_steps if request.noise_steps for point in (step, step + 1)}
        return _Plan(
            request,
            sigmas,
            upload(sigmas, self.device),
            encoded,
            branches[0],
            branches[1] if len(branches) > 1 else None,
            frozenset(request.noise_steps) if train else frozenset(),
            tuple(sorted(recorded or {sampling.num_inference_steps})) if train else (),
        )

    def denoise(self, plans: Sequence[_Plan], images: range) -> list[_Chunk]:
        chunks = [self._begun(plan, images) for plan in plans]
        for step in range(plans[0].request.sampling.num_inference_steps):
            with self._meter.measure(_shapes(plans, len(images))):
                velocities = self._velocities(chunks, step)
            for chunk, velocity in zip(chunks, velocities, strict=True):
                self._step(chunk, step, velocity)
        return chunks

    def _begun(self, plan: _Plan, images: range) -> _Chunk:
        request = plan.request
        shape = self.policy.latent_shape(request.sampling.resolution)
        latents = self._noise([generator(request.initial_seeds[i]) for i in images], shape)
        sources = [generator(request.noise_seeds[i]) for i in images]
        return _Chunk(plan, latents, sources, [latents] if 0 in plan.points else [], [])

    def _velocities(self, chunks: Sequence[_Chunk], step: int) -> list[Tensor]:
        """Returns the velocity of each chunk from one forward pass, or on CUDA perhaps from two (`apart`)."""
        first = chunks[0]
        sampling = first.plan.request.sampling
        sigma = first.plan.levels[step].expand(len(first.latents))
        if len(chunks) == 1:
            return [self.policy.velocity(first.latents, sigma, first.plan.positive, first.plan.negative, sampling)]
        velocities = self.policy.velocity_of(
            torch.cat([chunk.latents for chunk in chunks]),
            torch.cat([sigma] * len(chunks)),
            [chunk.plan.positive for chunk in chunks],
            [chunk.plan.negative for chunk in chunks if chunk.plan.negative is not None],
            sampling,
        )
        return list(velocities.chunk(len(chunks)))

    def _step(self, chunk: _Chunk, step: int, velocity: Tensor) -> None:
        plan, latents = chunk.plan, chunk.latents
        sampling = plan.request.sampling
        sigma, sigma_next = (plan.levels[i].expand(len(latents)) for i in (step, step + 1))
        if step not in plan.noisy:
            chunk.latents = sde.ode_step(latents, velocity, sigma, sigma_next)
        else:
            transition = sde.transition(
                latents,
                velocity,
                sigma,
                sigma_next,
                sigma_after_first=plan.levels[1],
                sde_type=sampling.sde_type,
                noise_level=sampling.noise_level,
            )
            chunk.latents = sde.sample(transition, self._noise(chunk.sources, tuple(latents.shape[1:])))
            if step in plan.request.train_steps:
                chunk.log_probs.append(sde.log_prob(chunk.latents, transition, sampling.sde_type).float())
        if step + 1 in plan.points:
            chunk.recorded.append(chunk.latents)

    def _noise(self, sources: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
        drawn = torch.empty(len(sources), *shape, dtype=torch.float32, pin_memory=self.device.type == "cuda")
        for row, source in zip(drawn, sources, strict=True):
            torch.randn(shape, generator=source, out=row)
        return upload(drawn, self.device)

    def _finish(self, plan: _Plan, chunks: Sequence[_Chunk]) -> Trajectory | None:
        """Waits for the device and returns the trajectory, None for an evaluation. Raises FloatingPointError."""
        request = plan.request
        tensors = [torch.stack([chunk.latents.isfinite().all() for chunk in chunks])]
        if request.kind == TRAIN:
            tensors += [
                torch.cat([torch.stack(chunk.recorded, dim=1) for chunk in chunks]),
                torch.cat([_columns(chunk) for chunk in chunks]),
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
            conditioning=dict(plan.encoded[0]),
            negative=dict(plan.encoded[1]) if request.prompt.images and len(plan.encoded) > 1 else None,
        )


def _columns(chunk: _Chunk) -> Tensor:
    """Returns the log-probs [n, W] of the trained steps, of which there may be none."""
    return torch.stack(chunk.log_probs, dim=1) if chunk.log_probs else chunk.latents.new_empty(len(chunk.latents), 0)


def _shapes(plans: Sequence[_Plan], images: int) -> Hashable:
    """Returns the key of one denoising step: steps with equal keys take equally many FLOPs."""
    prompts = [
        tuple(
            (name, tensor.shape) for branch in (plan.positive, plan.negative or {}) for name, tensor in branch.items()
        )
        for plan in plans
    ]
    return plans[0].request.sampling, images, tuple(prompts)


def check_alike(requests: Sequence[RolloutRequest]) -> None:
    """Raises ValueError for requests that cannot share a batch (see `DiffusersEngine.generate`)."""
    first = requests[0]
    for other in requests[1:]:
        same = (other.sampling, other.kind, other.version) == (first.sampling, first.kind, first.version)
        if not same or len(other.images) != len(first.images):
            raise ValueError(
                f"tickets {first.ordinal} and {other.ordinal} cannot share a batch: they must have the same version, "
                "kind, sampling and number of images"
            )


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
