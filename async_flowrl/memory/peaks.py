"""Peak memory of activations, counted by running the network on torch's meta device (shapes without data).

A plan asks for training's peak many times: once per layout of the trainer that it tries, for the layout that is
configured and for the cheapest one. So `remembered_training_peak` keeps what this process has counted; that of decoding
is kept by `sampling_peak`.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.footprint import Allocations, fused_attention
from async_flowrl.memory.meta_model import MetaModel, architecture, build_meta_model, conditioning
from async_flowrl.memory.meta_shapes import RememberedShapes
from async_flowrl.memory.text_lengths import text_lengths
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.training.fsdp import checkpoint_blocks, unplanned

_counted: dict[str, int] = {}
"""What a peak of training (`_key`) or of decoding depends on → its bytes."""


def remembered_training_peak(config: Config) -> int:
    """Returns `training_peak` in bytes, counted on a network of its own, or as it was counted before.

    It depends on neither the number of ranks nor the sharing of the base among them. The network computes once before,
    without gradients, so that tables which it keeps are not counted as training's.
    """
    key = _key(config)
    if key not in _counted:
        model = build_meta_model(config)
        with torch.no_grad(), RememberedShapes(), fused_attention():
            velocity(config, model, 1, "meta")
        _counted[key] = training_peak(config, model)
    return _counted[key]


def _key(config: Config) -> str:
    """Returns the configuration in words, without what says where ranks are and how they share the base.

    It begins with what is read from files: the model's architecture and the length of the longest prompt.
    """
    trainer = replace(
        config.trainer, num_workers=1, shard="none", shard_size=None, cpu_offload=False, workers_per_node=None
    )
    read = architecture(config), text_lengths(config).longest
    return f"{read} {replace(config, trainer=trainer, placement=SHARED)!r}"


def training_peak(config: Config, model: MetaModel, *, device: str = "meta") -> int:
    """Returns the peak bytes of forward and backward of one micro-batch, without the gradients of the adapter.

    If the run checkpoints, `model`'s network is wrapped for checkpointing, which cannot be undone.
    """
    policy, trainer = model.policy, config.trainer
    checkpoint_blocks(policy, unplanned(trainer.gradient_checkpointing, torch.device("cuda")))
    rows = trainer.micro_batch_size * (trainer.timesteps_per_forward or trained_steps(config))

    def forward() -> Tensor:
        return velocity(config, model, rows, device).square().mean()

    for parameter in policy.transformer.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return measured(forward, device)


def sampling_peak(config: Config, model: MetaModel) -> int:
    """Returns the larger of the peak bytes of one denoising step and of decoding.

    A denoising step has one chunk (`rollout.batch_size` images) of each ticket in a batch; decoding has one chunk.
    """
    rows = config.rollout.batch_size or config.images_per_ticket
    with torch.no_grad():
        denoise = measured(lambda: velocity(config, model, rows * config.rollout.tickets_per_batch, "meta"), "meta")
        return max(denoise, _decoding_peak(config, model, rows))


def _decoding_peak(config: Config, model: MetaModel, rows: int) -> int:
    """Returns the peak bytes of decoding `rows` images by the meta model's VAE, or as it was counted before."""
    policy, rollout = model.policy, config.rollout
    key = f"decode {architecture(config)} {rows} {rollout.resolution} {rollout.vae_slicing} {rollout.vae_tiling}"
    if key not in _counted:
        latents = torch.zeros(rows, *policy.latent_shape(rollout.resolution), device="meta")
        pipeline = policy._whole("decode images")
        _counted[key] = measured(lambda: policy._decoded(pipeline, latents, rollout.resolution), "meta")
    return _counted[key]


def velocity(config: Config, model: MetaModel, rows: int, device: str) -> Tensor:
    """Returns the velocity of `rows` images in one call of the network, of the meta model's policy."""
    policy, how = model.policy, sampling(config)
    latents = torch.zeros(rows, *policy.latent_shape(how.resolution), device=device)
    prompt = conditioning(policy, device)
    negative = prompt if how.true_cfg_scale > 1 else None
    return policy.velocity(latents, torch.full((rows,), 0.5, device=device), prompt, negative, how)


def measured(forward: Callable[[], Tensor], device: str) -> int:
    """Returns the peak bytes of `forward` and, if its result requires a gradient, of the backward pass."""
    allocations = Allocations()
    with RememberedShapes(), fused_attention() if device == "meta" else nullcontext(), allocations:
        out = forward()
        if out.requires_grad:
            out.backward()  # type: ignore[no-untyped-call]
    return allocations.peak
