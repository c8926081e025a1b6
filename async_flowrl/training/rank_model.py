"""The model of a trainer rank: the base model with what is trained, in this rank's memory, as the ranks share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from async_flowrl.algorithms.registry import check_schedule
from async_flowrl.config.resolution import in_pixels
from async_flowrl.config.schema import FULL, Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.kernels import compile_blocks
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.registry import ResolvedModel, load_policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.tickets.request import sampling
from async_flowrl.training.base_weights import digest_of_stored, stream_base
from async_flowrl.training.fsdp import World, checkpoint_blocks, shard, unplanned
from async_flowrl.training.full_shards import shard_trained
from async_flowrl.types import Resolution
from checkpoint_engine import base_digest


@dataclass(frozen=True)
class ModelInputs:
    """What a rank's model is made from."""

    config: Config
    model: ResolvedModel
    device: torch.device
    sizes: Sequence[Resolution]
    """Sizes of the trained images, for each of which the algorithm's schedule is checked."""
    one_base: OneBase | None
    """Base weights that the rollout worker of the same process has, too; None without such a worker."""


@dataclass(frozen=True)
class RankModel:
    """A rank's model, and what is known of it."""

    policy: Policy
    trained: Mapping[str, nn.Parameter]
    """Layout name → trained parameter."""
    dtypes: Mapping[str, torch.dtype]
    """Layout name → dtype of the trained parameter before several ranks share it, which makes it float32."""
    world: World
    """The ranks, with the number of them that hold one copy of the base together."""
    layout: str
    """How the ranks hold the base, in words."""
    base_digest: str
    base_parameters: int


def load_model(inputs: ModelInputs, world: World) -> RankModel:
    """Builds the model of one of the ranks of `world`, and reads its base weights.

    Raises ValueError if the model does not fit the configuration: its sizes, its schedule, its layers.
    """
    config, trainer, one_base = inputs.config, inputs.config.trainer, inputs.one_base
    # A single rank reads the model to the CPU. Several ranks read nothing before each has memory for its shard.
    parts = "structure" if world.joined or one_base is not None else "transformer"
    policy = load_policy(inputs.model, dtype=inputs.model.dtype, device="cpu", parts=parts)
    tuning = tuning_of(config)
    if one_base is not None:
        one_base.lend(policy.transformer, trained=tuning.parameters(policy.transformer))
    policy.check(sampling(config))
    _check_schedules(config, policy, inputs.sizes)
    base = dict(policy.transformer.named_parameters())
    count = sum(parameter.numel() for parameter in base.values())
    digest = _digest(inputs, world, base)
    tuning.attach(policy, config.seed)
    tuning.warm_start(policy)
    checkpoint_blocks(policy, unplanned(trainer.gradient_checkpointing, inputs.device))
    if trainer.compile:
        compile_blocks(policy)
    dtypes = tuning.dtypes(policy.transformer)  # Read before sharding, which makes them float32.
    world, layout = _lay_out(inputs, policy, set(tuning.parameters(policy.transformer).values()), world)
    # Read after `_lay_out`, which replaces the parameters of the base by other objects if there are several ranks.
    trained = tuning.parameters(policy.transformer)
    return RankModel(policy, trained, dtypes, world, layout, digest, count)


def _digest(inputs: ModelInputs, world: World, base: Mapping[str, Tensor]) -> str:
    """Returns the digest of the base weights; if several ranks read them together, only the first rank has it."""
    if inputs.one_base is not None:
        return inputs.one_base.digest
    return digest_of_stored(inputs.model, world, set(base)) if world.joined else base_digest(base)


def _check_schedules(config: Config, policy: Policy, sizes: Sequence[Resolution]) -> None:
    for resolution in sizes:
        sigmas = policy.sigmas(config.rollout.num_inference_steps, resolution)
        try:
            check_schedule(config.algorithm, sigmas, max_staleness=config.max_staleness)
        except ValueError as error:
            where = f"images of {in_pixels(resolution)}: " if len(sizes) > 1 else ""
            raise ValueError(f"{where}{error}") from error


def _lay_out(inputs: ModelInputs, policy: Policy, trained: set[nn.Parameter], world: World) -> tuple[World, str]:
    """Gives the base weights their memory on this rank and, with several ranks, reads them from the files.

    Returns the world with the ranks per replica, and how the ranks hold the base, in words.
    """
    config, device, offload = inputs.config, inputs.device, inputs.config.trainer.cpu_offload
    sharded = world.joined and config.is_sharded
    per_replica = config.ranks_per_replica(world.size, sharded=sharded)
    world = replace(world, per_replica=per_replica, by_group=sharded and config.tune == FULL)
    if world.by_group:
        layout = shard_trained(policy, trained, world, device)
    else:
        layout = shard(policy, trained, world, device=device, sharded=sharded, offload=offload)
    if world.joined and inputs.one_base is None:
        stream_base(policy.transformer, inputs.model, world, device=device, offload=offload)
    return world, layout
