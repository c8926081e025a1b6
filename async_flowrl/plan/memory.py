"""Memory plan: device memory of a trainer rank and of a rollout worker, and the bytes of a payload.

Weights, adapter, optimizer and versions are counted from shapes. Activations are counted by running the network on the
meta device, forward and backward, at the run's resolution, micro-batch, guidance and checkpointing.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from async_flowrl.algorithms.ema import samples_from_average
from async_flowrl.config.schema import Config
from async_flowrl.plan.footprint import Allocations, fused_attention
from async_flowrl.plan.meta_model import MetaModel, build_meta_model, conditioning
from async_flowrl.tickets.arithmetic import stored_bytes, ticket_bytes, trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.training.fsdp import checkpoint_blocks, is_sharded, ranks_per_replica, resident_bytes

FLOAT32_BYTES = 4
INT64_BYTES = 8
MARGIN_SHARE = 0.10
"""Added for what the allocator cannot use (fragments between blocks); measured on no GPU yet."""
RUNTIME_BYTES = 1_500_000_000
"""CUDA context, libraries' workspaces and communicators; measured on no GPU yet."""
MAX_GATHERED_BLOCKS = 3
"""Blocks that FSDP holds whole at once: the one that computes, the next one, and the buffer it is gathered in."""


DEVICE_BYTES = 79 * 2**30
"""Of a card sold as 80 GB, where nothing else is said."""
PASSING = ("activations", "gathered blocks")
"""Parts that come and go; all others are there all the time."""


@dataclass(frozen=True)
class Footprint:
    """Named bytes on a device, of one process or of all that share it."""

    parts: Mapping[str, int]
    processes: int = 1
    """How many there are, each with a runtime of its own."""

    @property
    def lasting(self) -> set[str]:
        """Names of the parts that are there all the time: weights, optimizer and versions."""
        return {name for name in self.parts if not name.startswith(PASSING)}

    @property
    def resident(self) -> int:
        """Weights, optimizer and versions alone."""
        return sum(self.parts[name] for name in self.lasting)

    @property
    def total(self) -> int:
        """With margin and runtime."""
        return round(sum(self.parts.values()) * (1 + MARGIN_SHARE)) + self.processes * RUNTIME_BYTES


def beside(trainer: Footprint, rollout: Footprint, workers: int = 1, *, processes: int = 2) -> Footprint:
    """Of a trainer rank with rollout workers on its device."""
    parts = {f"{name} (trainer)": size for name, size in trainer.parts.items()}
    parts |= {f"{name} (rollout)": size * workers for name, size in rollout.parts.items()}
    return Footprint(parts, processes)


@dataclass(frozen=True)
class Peaks:
    """Bytes of passing tensors, of an update and of the making of images."""

    training: int
    sampling: int


@dataclass(frozen=True)
class MemoryPlan:
    """`host`: pinned host memory of a trainer rank; `payload`: bytes in the object store at once, all versions."""

    model: MetaModel
    trainer: Footprint
    rollout: Footprint
    host: int
    ticket_bytes: int
    payload: int
    adapter_bytes: int
    peaks: Peaks


def plan_memory(config: Config, device_bytes: int = DEVICE_BYTES) -> MemoryPlan:
    """On devices of `device_bytes`. Raises ValueError where the model cannot be built without its weights."""
    model = build_meta_model(config)
    sampling_bytes = sampling_peak(config, model)
    activations = training_peak(config, model)
    shapes = model.policy.shapes(config.rollout.resolution)
    return MemoryPlan(
        model=model,
        trainer=trainer_footprint(config, model, device_bytes, activations),
        rollout=rollout_footprint(config, model, sampling_bytes),
        host=_share(config, model) if config.trainer.cpu_offload else 0,
        ticket_bytes=ticket_bytes(config, shapes),
        payload=stored_bytes(config, shapes),
        adapter_bytes=model.version_bytes,
        peaks=Peaks(activations, sampling_bytes),
    )


def _share(config: Config, model: MetaModel) -> int:
    return -(-model.base_bytes // ranks_per_replica(config, config.trainer.num_workers, sharded=True))


def trainer_footprint(config: Config, model: MetaModel, device_bytes: int, activations: int = 0) -> Footprint:
    """Of a rank on a device of `device_bytes`, which say whether `trainer.shard=auto` shards."""
    trainer, vector = config.trainer, model.adapter_parameters * FLOAT32_BYTES
    joined = trainer.num_workers > 1 or trainer.cpu_offload
    held = resident_bytes(config, model.adapter_parameters)
    sharded = joined and is_sharded(config, model.base_bytes, device_bytes, held)
    averaged = samples_from_average(config.algorithm.name, config.algorithm.old_policy_decay)
    streams = 2 if trainer.ema_decay is not None else 1
    # Versions retained and those in the two slots that each stream leaves from; in float32 the moving averages, a warm
    # start, and the live values while a version is in their place.
    versions = config.max_staleness + 1 + 2 * streams
    masters = averaged + (streams - 1) + (config.lora.path is not None) + 1
    # Of several ranks also the weights at the start of the batch, where a later optimizer step may look back at them.
    masters += trainer.num_workers > 1 and trainer.updates_per_batch > 1
    parts = {
        "base weights": model.base_bytes + model.buffer_bytes,
        "adapter and its gradient": 2 * vector,
        "optimizer": 2 * vector,
        # int64, of several ranks beside the whole, because a sum outlives a reduction that breaks off; what was used
        # holds the weights before the step.
        "sum of the gradients": (2 if trainer.num_workers > 1 else 1) * model.adapter_parameters * INT64_BYTES,
        "versions of the adapter": versions * model.version_bytes + masters * vector,
        "activations": activations,
    }
    if sharded:
        parts["base weights"] = model.buffer_bytes + (0 if trainer.cpu_offload else _share(config, model))
        parts["gathered blocks"] = model.root_bytes + MAX_GATHERED_BLOCKS * max(model.block_bytes)
    return Footprint(parts)


def rollout_footprint(config: Config, model: MetaModel, activations: int = 0) -> Footprint:
    """Of a rollout worker; of one of its GPUs where vllm_omni spreads the network over several.

    Of vllm_omni everything but the network is counted as if each GPU held it whole, which is the most it can be.
    """
    text, where = model.text_parameters * model.itemsize, config.rollout.text_encoder
    base = -(-model.base_bytes // rollout_ranks(config)) + model.buffer_bytes
    # An encoder that visits does so before there are activations, and one that is loaded has the network's place.
    visiting = {"resident": 0, "offload": text, "cached": text - base}[where]
    streams = 2 if config.trainer.ema_decay is not None else 1
    # Live, the ring of each stream, one being received; and a slot for evaluation.
    copies = 1 + streams * (config.max_staleness + 1) + 1 + 1
    return Footprint(
        {
            "base weights": base,
            "text encoders": text if where == "resident" else 0,
            "VAE": model.vae_parameters * model.itemsize,
            "versions of the adapter": copies * model.version_bytes,
            "activations": max(activations, visiting) if activations else 0,
        }
    )


def rollout_ranks(config: Config) -> int:
    """GPUs that one rollout worker's network is spread over."""
    return max(1, int(config.rollout.gpus_per_worker)) if config.rollout.engine == "vllm_omni" else 1


def training_peak(config: Config, model: MetaModel, *, device: str = "meta") -> int:
    """Peak bytes of one micro-batch, forward and backward; the gradients of the adapter exist already.

    The network is wrapped for checkpointing where the run does that.
    """
    policy, trainer = model.policy, config.trainer
    checkpoint_blocks(policy, trainer.gradient_checkpointing)
    rows = trainer.micro_batch_size * (trainer.timesteps_per_forward or trained_steps(config))

    def forward() -> Tensor:
        return _velocity(config, model, rows, device).square().mean()

    for parameter in policy.transformer.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return measured(forward, device)


def sampling_peak(config: Config, model: MetaModel) -> int:
    """Peak bytes of one denoising step of a chunk per ticket in a batch, or of decoding one if that needs more."""
    policy, rows = model.policy, config.rollout.batch_size or config.images_per_ticket
    latents = torch.zeros(rows, *policy.latent_shape(config.rollout.resolution), device="meta")
    pipeline = policy._whole("decode images")
    with torch.no_grad():
        denoise = measured(lambda: _velocity(config, model, rows * config.rollout.tickets_per_batch, "meta"), "meta")
        decode = measured(lambda: policy._decoded(pipeline, latents, config.rollout.resolution), "meta")
    return max(denoise, decode)


def _velocity(config: Config, model: MetaModel, rows: int, device: str) -> Tensor:
    policy, how = model.policy, sampling(config)
    latents = torch.zeros(rows, *policy.latent_shape(how.resolution), device=device)
    prompt = conditioning(policy, device)
    negative = prompt if how.true_cfg_scale > 1 else None
    return policy.velocity(latents, torch.full((rows,), 0.5, device=device), prompt, negative, how)


def measured(forward: Callable[[], Tensor], device: str) -> int:
    """Peak bytes of `forward` and, where its result has a gradient, of the backward pass."""
    allocations = Allocations()
    with fused_attention() if device == "meta" else nullcontext(), allocations:
        out = forward()
        if out.requires_grad:
            out.backward()  # type: ignore[no-untyped-call]
    return allocations.peak
