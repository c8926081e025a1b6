"""The model of a trainer rank: the base model with what is trained, in this rank's memory, as the ranks share it.

Several ranks read the base weights together (`stream_base`): only rank 0 opens the files, and no rank ever holds more
than its share and one whole tensor.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_flowrl.algorithms.registry import check_schedule
from async_flowrl.config.resolution import Resolution, in_pixels
from async_flowrl.config.schema import Config
from async_flowrl.policies.kernels import compile_blocks
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel, load_policy, weights_of
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.tickets.request import sampling
from async_flowrl.training.fsdp import checkpoint_blocks, shard
from async_flowrl.training.parts import World
from async_flowrl.training.sharded import shard_trained
from checkpoint_engine import base_digest


def load_model(
    config: Config,
    model: ResolvedModel,
    *,
    device: torch.device,
    sizes: Sequence[Resolution],
    one_base: OneBase | None,
    world: World,
) -> tuple[PipelinePolicy, Mapping[str, torch.dtype], World, dict[str, Any]]:
    """Builds the model of one of the ranks of `world`, and reads its base weights.

    Returns it, the dtypes of what is trained by layout name, as it is sent, the world with the number of ranks that
    hold one copy of the base together, and what the rank reports of the base.
    `sizes`: of the trained images, for each of which the algorithm's schedule is checked. `one_base`: the base weights
    that the rollout worker of the same process has, too; None without such a worker. Raises ValueError if the model
    does not fit the configuration: its sizes, its schedule, its layers.
    """
    trainer = config.trainer
    # Several ranks read nothing before each has memory for its shard.
    parts = "structure" if world.joined or one_base is not None else "transformer"
    policy = load_policy(model, dtype=model.dtype, device=device, parts=parts)
    tuning = tuning_of(config)
    if one_base is not None:
        one_base.share_parameters(policy.transformer, trained=tuning.parameters(policy.transformer))
    schedules = check_policy(config, policy, sizes)
    base = dict(policy.transformer.named_parameters())
    count = sum(parameter.numel() for parameter in base.values())
    if one_base is not None:
        digest = one_base.digest
    else:
        digest = digest_of_stored(model, world, set(base)) if world.joined else base_digest(base)
    tuning.attach(policy, config.seed)
    tuning.warm_start(policy)
    # What `auto` is where nobody has decided it: what is sure to need least on a GPU.
    unplanned = {"auto": "full" if device.type == "cuda" else "none"}
    checkpoint_blocks(policy, unplanned.get(trainer.gradient_checkpointing, trainer.gradient_checkpointing))
    if trainer.compile:
        compile_blocks(policy)
    dtypes = tuning.dtypes(policy.transformer)  # Read before sharding, which makes them float32.
    trained_before = set(tuning.parameters(policy.transformer).values())
    world, layout = _lay_out(config, policy, trained_before, world, device)
    if world.joined and one_base is None:
        stream_base(policy.transformer, model, world, device=device, offload=trainer.cpu_offload)
    report = {"base_digest": digest, "schedules": schedules, "layout": layout, "base_parameters": count}
    return policy, dtypes, world, report


def check_policy(config: Config, policy: PipelinePolicy, sizes: Sequence[Resolution]) -> str:
    """Returns the digest of the noise levels. Raises ValueError for guidance or noise levels that cannot be used."""
    policy.check(sampling(config))
    digest = hashlib.sha256()
    for resolution in sizes:
        sigmas = policy.sigmas(config.rollout.num_inference_steps, resolution)
        try:
            check_schedule(config.algorithm, sigmas, max_staleness=config.max_staleness)
        except ValueError as error:
            where = f"images of {in_pixels(resolution)}: " if len(sizes) > 1 else ""
            raise ValueError(f"{where}{error}") from error
        digest.update(sigmas.numpy().tobytes())
    return digest.hexdigest()


def _lay_out(
    config: Config, policy: PipelinePolicy, trained: set[nn.Parameter], world: World, device: torch.device
) -> tuple[World, str]:
    """Gives the base weights their place; returns the world with ranks per replica, and the layout in words."""
    sharded = world.joined and config.is_sharded
    per_replica = config.ranks_per_replica(world.size, sharded=sharded)
    world = replace(world, per_replica=per_replica, by_group=sharded and tuning_of(config).whole)
    if world.by_group:
        layout = shard_trained(policy, trained, world, device)
    else:
        layout = shard(policy, trained, world, device=device, sharded=sharded, offload=config.trainer.cpu_offload)
    return world, layout


def digest_of_stored(model: ResolvedModel, world: World, parameters: set[str]) -> str:
    """Returns the digest of the base weights named in `parameters` from the files on rank 0, and "" on other ranks."""
    if world.rank != 0:
        return ""
    return base_digest(weights_of(model), parameters)


def stream_base(
    transformer: nn.Module, model: ResolvedModel, world: World, *, device: torch.device, offload: bool
) -> None:
    """Gives parameters on the meta device memory and fills them from the files; all ranks must call it.

    Call it after `shard`, with an attached LoRA already in memory. Collectives run on `device`; the weights stay there,
    or with `offload` in host memory. Raises ValueError if files and network have different tensor names.
    """
    home = torch.device("cpu") if offload else device
    cast("Any", transformer)._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t)
    stored = weights_of(model) if world.rank == 0 else None
    targets = base_tensors(transformer)
    _same_names(targets, stored)
    for name in sorted(targets):
        target = targets[name]
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if stored is not None:
            whole.copy_(stored[name])
        dist.broadcast(whole, 0)
        _place(target, whole, world)
        del whole  # frees its memory before the next tensor is created


def base_tensors(transformer: nn.Module) -> dict[str, Tensor]:
    """Returns the base's parameters and saved buffers by their names in the model's files, without the LoRA."""
    state = cast("Any", transformer).state_dict(keep_vars=True)
    return {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}


@torch.no_grad()
def _place(target: Tensor, whole: Tensor, world: World) -> None:
    """Copies this rank's share of `whole`. FSDP2 shards by rows like torch.chunk; some ranks may have none."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    chunks = torch.chunk(whole, world.per_replica, dim=0)
    number = world.rank % world.per_replica
    if number < len(chunks):
        target.to_local().copy_(chunks[number])


def _same_names(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor] | None) -> None:
    """Raises ValueError on all ranks if names differ, so that no rank waits for another one in a collective."""
    odd = [sorted(targets.keys() ^ stored.keys())] if stored is not None else [None]
    dist.broadcast_object_list(odd, 0)
    if odd[0]:
        who_lacks = "the files lack" if odd[0][0] in targets else "the network has no"
        raise ValueError(f"the weights do not fit the model: {who_lacks} {odd[0][0]} ({len(odd[0])} names differ)")
