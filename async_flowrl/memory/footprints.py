"""Device memory of a trainer rank and of a rollout worker, and bytes in the object store, by `plan_memory`.

What lasts (weights, adapter, optimizer, versions) is counted from sizes. Activations are what a rehearsal of the
workers (memory/rehearsed.py) holds beside that at its peak.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from async_flowrl.algorithms.base import differentiates_reward
from async_flowrl.algorithms.ema import kept_vectors
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.memory.model_sizes import Sizes
from async_flowrl.memory.rehearsed import (
    GATHERED_BLOCKS,
    alone,
    model_sizes,
    rehearsed_rank,
    rehearsed_rollout,
    sampling_bytes,
    training_peak,
)
from async_flowrl.rewards.registry import memory_gib
from async_flowrl.tickets.arithmetic import SENT_VERSIONS, stored_bytes, ticket_bytes, trained_steps
from checkpoint_engine.side_stream import pinned_bytes

GIB = 2**30
FLOAT32_BYTES = 4
INT64_BYTES = 8
# Share added for memory that the allocator cannot use (fragments between blocks); an estimate, not measured.
MARGIN_SHARE = 0.10
# Bytes added per process for CUDA context, workspaces of libraries and communicators; an estimate, not measured.
RUNTIME_BYTES = 1_500_000_000
# Blocks whose gradient is whole at once, in the dtype that is computed in and as the input of a reduce-scatter.
REDUCED_BLOCKS = 2


# Parts of a footprint that take memory only at times; all other parts last.
PASSING = ("activations", "gathered blocks")


@dataclass(frozen=True)
class Footprint:
    parts: Mapping[str, int]  # Name of a part (such as `base weights`) → bytes.

    @property
    def lasting(self) -> set[str]:
        """Names of the parts that take memory all the time: weights, optimizer and versions."""
        return {name for name in self.parts if not name.startswith(PASSING)}

    @property
    def resident(self) -> int:
        return sum(self.parts[name] for name in self.lasting)

    @property
    def total(self) -> int:
        return round(sum(self.parts.values()) * (1 + MARGIN_SHARE)) + RUNTIME_BYTES


def beside(trainer: Footprint, rollout: Footprint, workers: int) -> Footprint:
    """Returns the memory of one process with a trainer rank and `workers` rollout workers, each with its own base."""
    parts = {f"{name} (trainer)": size for name, size in trainer.parts.items()}
    parts |= {f"{name} (rollout)": size * workers for name, size in rollout.parts.items()}
    return Footprint(parts)


def in_one(trainer: Footprint, rollout: Footprint, *, full: bool) -> Footprint:
    """Returns the memory of a process that samples and trains: one frozen base, one kind of activations."""
    # With `full`, whole weights are trained, and each side has its own.
    once = [name for name in trainer.parts if name == "activations" or (name == "base weights" and not full)]
    parts = {name: max(trainer.parts[name], rollout.parts[name]) for name in once}
    alone = {
        side: {n: size for n, size in footprint.parts.items() if n not in once}
        for side, footprint in (("trainer", trainer), ("rollout", rollout))
    }
    parts |= {f"{name} ({side})": size for side, held in alone.items() for name, size in held.items()}
    return Footprint(parts)


@dataclass(frozen=True)
class Process:
    title: str
    pools: tuple[str, ...]  # Pools whose workers are such a process.
    footprint: Footprint
    share: float  # GPUs of the process: a share of one device, or whole devices from 1 on.
    key: str = ""  # Setting of the share of a reward worker; empty for all other processes.
    caveat: str = ""  # Clause for the end of a sentence on memory that is not known.

    def available(self, device: int) -> int:
        return round(device * (min(1.0, self.share) or 1.0))


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a configuration needs. All sizes are in bytes."""

    model: Sizes
    trainer: Footprint
    rollout: Footprint
    host: int  # Host memory of a trainer rank: pinned, and by `trainer.sum_on` and `trainer.versions_on`.
    ring: int  # Versions that a rollout worker keeps in host memory; 0 if it keeps them on its device.
    snapshot: int  # Copy in host memory of what a checkpoint holds, on each trainer rank that writes one.
    ticket_bytes: int  # Images and trajectory of one ticket in the object store.
    payload: int  # Most that lies in the object store at the same time: tickets, a state that is kept, and weights.
    sent_weights: int  # The weights among that, on their way to rollout workers.


def plan_memory(config: Config) -> MemoryPlan:
    """Plans a configuration's memory with a layout. ValueError if the model can't be built; errors of a rehearsal."""
    model, shapes = model_sizes(config), rehearsed_rank(config).shapes
    sent = SENT_VERSIONS * model.version_bytes
    return MemoryPlan(
        model=model,
        trainer=planned_trainer(config),
        rollout=planned_rollout(config),
        host=host_bytes(config, model) + aside_bytes(config, model),
        ring=ring_bytes(config, model),
        snapshot=snapshot_bytes(config, model),
        ticket_bytes=ticket_bytes(config, shapes),
        payload=stored_bytes(config, shapes, model.adapter_parameters) + sent,
        sent_weights=sent,
    )


def planned_trainer(config: Config, *, lasting: bool = False) -> Footprint:
    """Returns the memory of a trainer rank, with `lasting` without activations. Raises as `plan_memory`."""
    model, passing = model_sizes(config), 0
    if not lasting:
        passing = max(0, training_peak(config) - trainer_footprint(alone(config), model).resident)
    held = trainer_footprint(config, model, passing)
    return Footprint({**held.parts, **reward_parts(config)})


def reward_parts(config: Config) -> dict[str, int]:
    """Returns name of a part → bytes of the rewards whose gradient a trainer rank takes, as far as they state them."""
    if not differentiates_reward(build_algorithm(config)):
        return {}
    rows = config.trainer.micro_batch_size * (config.trainer.timesteps_per_forward or trained_steps(config))
    gib = {name: memory_gib(name, term, differentiated=rows) for name, term in config.reward.terms.items()}
    return {f"reward {name}": round(each * GIB) for name, each in gib.items() if each is not None}


def planned_rollout(config: Config, *, lasting: bool = False) -> Footprint:
    """Returns the memory of a rollout worker, with `lasting` without activations and VAE. Raises as `plan_memory`."""
    model = model_sizes(config)
    if lasting:
        return rollout_footprint(config, model)
    vae = rehearsed_rollout(config).vae_parameters
    return rollout_footprint(config, replace(model, vae_parameters=vae), sampling_bytes(config))


def trainer_footprint(config: Config, model: Sizes, activations: int = 0) -> Footprint:
    """Returns the memory of a trainer rank; `activations` is the peak of its activations in bytes."""
    # `trainer.shard=auto` counts as none. The rows on which the KL of an optimizer step is measured are left out:
    # latents of at most `algorithm.kl_probe_images` images at all trained noise levels, and the conditioning of their
    # prompt.
    trainer, vector = config.trainer, model.adapter_parameters * FLOAT32_BYTES
    joined = trainer.num_workers > 1 or trainer.cpu_offload
    sharded = joined and config.is_sharded
    # `versions`: those retained, and two slots per stream from which versions are sent; shares are gathered in host
    # memory. `masters`, float32: the moving averages, a warm start, and a copy of the live values while a version
    # replaces them.
    versions = 0 if trainer.versions_on == "host" else kept_and_staged(config)
    masters = moving_averages(config) + (config.lora.path is not None) + len(config.algorithm.teachers) + 1
    if model.full:
        whole = _full_parts(config, model, activations, versions, masters)
        return Footprint(_share(whole, model, trainer.num_workers) if sharded else whole)
    parts = {
        "base weights": model.base_bytes + model.buffer_bytes,
        "adapter and its gradient": 2 * vector,
        "optimizer": 2 * vector,
        "sum of the gradients": sum_bytes(config, model) if config.trainer.sum_on == "device" else 0,
        "versions of the adapter": versions * model.version_bytes + masters * vector,
        "activations": activations,
    }
    if sharded:
        parts["base weights"] = model.buffer_bytes + (0 if trainer.cpu_offload else base_share(config, model))
        parts["gathered blocks"] = model.root_bytes + GATHERED_BLOCKS * model.block_bytes
    return Footprint(parts)


def kept_and_staged(config: Config) -> int:
    return config.live_versions + (0 if config.in_shares else 2 * streams(config))


def sum_bytes(config: Config, model: Sizes) -> int:
    """Returns the bytes of the int64 sum of the gradients of one rank, wherever it is."""
    # With several ranks that do not share it there are two buffers: the rank's own sum and the sum over all ranks. On
    # the device a buffer is used afterwards for the weights before the step, so these are not counted again.
    one, ranks = model.adapter_parameters * INT64_BYTES, config.trainer.num_workers
    return -(-one // ranks) if config.in_shares else one * min(2, ranks)


def aside_bytes(config: Config, model: Sizes) -> int:
    """Returns the bytes of a trainer rank in host memory by `trainer.sum_on` and `trainer.versions_on`."""
    # Buffers from which whole weights are sent are counted by `host_bytes`.
    versions = config.live_versions if model.full else kept_and_staged(config)
    versions = versions * model.version_bytes // (config.trainer.num_workers if config.in_shares else 1)
    places = ((config.trainer.sum_on, sum_bytes(config, model)), (config.trainer.versions_on, versions))
    return sum(size for where, size in places if where == "host")


def _full_parts(config: Config, model: Sizes, activations: int, versions: int, masters: int) -> dict[str, int]:
    # Name → bytes for a rank that trains and holds all weights. In float32 the network computes with the masters;
    # otherwise it has weights of its own beside them.
    vector, beside_masters = model.adapter_parameters * FLOAT32_BYTES, model.itemsize < FLOAT32_BYTES
    if beside_masters:
        masters -= 1  # No copy of the live values is made while a version replaces them: the masters give them back.
    reference = "reference" in build_algorithm(config).needs
    return {
        "base weights": model.base_bytes + model.buffer_bytes - (0 if beside_masters else vector),
        "masters and their gradient": 2 * vector,
        "optimizer": 2 * vector,
        "sum of the gradients": sum_bytes(config, model) if config.trainer.sum_on == "device" else 0,
        "versions of the weights": (versions + reference) * model.version_bytes + masters * vector,
        "activations": activations,
    }


def _share(parts: Mapping[str, int], model: Sizes, ranks: int) -> dict[str, int]:
    # Name → bytes for one of `ranks` ranks that share what they train. FSDP2 keeps the trained weights in float32
    # beside the masters, and frozen weights in their own dtype.
    trained, frozen = model.adapter_parameters, model.base_bytes - model.version_bytes
    counted = {"base weights", "activations", "sum of the gradients"}
    shares = {name: math.ceil(size / ranks) for name, size in parts.items() if name not in counted}
    blocks = GATHERED_BLOCKS + REDUCED_BLOCKS * (1 + FLOAT32_BYTES / model.itemsize)
    return {
        "base weights": model.buffer_bytes + math.ceil((frozen + FLOAT32_BYTES * trained) / ranks),
        **shares,
        "sum of the gradients": parts["sum of the gradients"],
        "activations": parts["activations"],
        "gathered blocks": model.root_bytes + math.ceil(blocks * model.block_bytes),
    }


def rollout_footprint(config: Config, model: Sizes, activations: int = 0) -> Footprint:
    """Returns the memory of a rollout worker; `activations` is the peak of its activations in bytes."""
    # With the engine vllm_omni it is the memory on one of the worker's GPUs: the network is divided among them, and all
    # other parts are counted whole, which is an upper limit.
    text, where = model.text_bytes, config.rollout.text_encoder
    frozen = model.base_bytes - model.version_bytes if model.full else model.base_bytes
    base = -(-frozen // rollout_ranks(config)) + model.buffer_bytes
    # With `offload` the encoders are on the device only before the activations, with `cached` instead of the network.
    visiting = {"resident": 0, "offload": text, "cached": text - base}[where]
    copies = 1 + (0 if config.versions_on_host else received_versions(config))
    return Footprint(
        {
            "base weights": base,
            "text encoders": text if where == "resident" else 0,
            "VAE": model.vae_parameters * model.itemsize,
            f"versions of the {'weights' if model.full else 'adapter'}": copies * model.version_bytes,
            "activations": max(activations, visiting) if activations else 0,
        }
    )


def rollout_ranks(config: Config) -> int:
    return max(1, int(config.rollout.gpus_per_worker)) if config.rollout.engine == "vllm_omni" else 1


def base_share(config: Config, model: Sizes) -> int:
    return -(-model.base_bytes // config.ranks_per_replica(config.trainer.num_workers, sharded=True))


def host_bytes(config: Config, model: Sizes, *, certain: bool = False) -> int:
    """Returns the bytes that a trainer rank pins: an offloaded base, or with tune=full versions that are sent."""
    # A LoRA's versions are small and left out. The first rank alone sends; what it gathers from shares is not pinned.
    # `certain` leaves out room for versions that may never be held, and what rounding adds.
    if not model.full:
        # FSDP2 pins each tensor's rows by themselves, and torch rounds what it pins up to a power of two.
        return (1 if certain else 2) * base_share(config, model) if config.trainer.cpu_offload else 0
    if config.in_shares:
        return (1 if certain else sent_versions(config)) * model.version_bytes
    return (kept_versions(config) if certain else sent_versions(config)) * pinned_bytes(model.version_bytes)


def sent_versions(config: Config) -> int:
    # For each stream these are the newest `live_versions`, one that is being sealed, and one that is held for its
    # evaluation. If the policy itself is evaluated, because there is no EMA, one more can be held for the next
    # evaluation before the first is released. Of versions in shares, they are the newest one of each stream, one that
    # is being gathered, and of both streams together one that is gathered once more.
    if config.in_shares:
        return 2 * streams(config) + 1
    held_twice = config.trainer.ema_decay is None and config.evaluate.every > 0
    return streams(config) * (config.live_versions + 2) + held_twice


def kept_versions(config: Config) -> int:
    return min(config.live_versions, config.total_steps)


def received_versions(config: Config) -> int:
    # The ring has one slot for each version that a ticket may name. There is one slot for evaluation, and one version
    # is being received.
    return config.live_versions + 1 + 1


def ring_bytes(config: Config, model: Sizes, *, pinned: bool = True, certain: bool = False) -> int:
    """Returns the bytes of the versions that a rollout worker keeps in host memory; `certain` as for `host_bytes`."""
    # `pinned` is for a worker with a GPU, where a small version takes more than its own size.
    if not config.versions_on_host:
        return 0
    versions = kept_versions(config) if certain else received_versions(config)
    return versions * (pinned_bytes(model.version_bytes) if pinned else model.version_bytes)


def snapshot_bytes(config: Config, model: Sizes) -> int:
    # The masters and both Adam moments in float32, the moving averages if any, and all kept versions; of its share
    # only.
    whole = (
        3 + moving_averages(config)
    ) * model.adapter_parameters * FLOAT32_BYTES + config.live_versions * model.version_bytes
    return -(-whole // (config.trainer.num_workers if config.in_shares else 1))


def streams(config: Config) -> int:
    return 2 if config.trainer.ema_decay is not None else 1


def moving_averages(config: Config) -> int:
    return streams(config) - 1 + kept_vectors(config.algorithm)
