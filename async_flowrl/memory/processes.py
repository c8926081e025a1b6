"""Memory plan: device memory of a trainer rank and of a rollout worker, and bytes in the object store.

`plan_memory` makes it. Weights, adapter (LoRA), optimizer and versions are counted from shapes. Activations are counted
by running the network on the meta device, forward and backward, with the run's resolution, micro-batch, guidance and
checkpointing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config
from async_flowrl.config.sharding import is_sharded
from async_flowrl.memory.full_shares import of_one_rank
from async_flowrl.memory.host_memory import (
    FLOAT32_BYTES,
    base_share,
    host_bytes,
    in_shares,
    moving_averages,
    received_versions,
    ring_bytes,
    snapshot_bytes,
    streams,
)
from async_flowrl.memory.sizes import Sizes
from async_flowrl.tickets.arithmetic import SENT_VERSIONS, stored_bytes, ticket_bytes

if TYPE_CHECKING:
    from async_flowrl.memory.meta_model import MetaModel

INT64_BYTES = 8
MARGIN_SHARE = 0.10
"""Share added for memory that the allocator cannot use (fragments between blocks); an estimate, not measured."""
RUNTIME_BYTES = 1_500_000_000
"""Bytes added per process for CUDA context, workspaces of libraries and communicators; an estimate, not measured."""
MAX_GATHERED_BLOCKS = 3
"""Blocks that FSDP holds whole at once: the one that computes, the next one, and the buffer it is gathered in."""


PASSING = ("activations", "gathered blocks")
"""Parts of a footprint that take memory only at times; all other parts last."""


@dataclass(frozen=True)
class Footprint:
    """Device memory of one process."""

    parts: Mapping[str, int]
    """Name of a part (such as `base weights`) → bytes."""

    @property
    def lasting(self) -> set[str]:
        """Names of the parts that take memory all the time: weights, optimizer and versions."""
        return {name for name in self.parts if not name.startswith(PASSING)}

    @property
    def resident(self) -> int:
        """Bytes of the lasting parts."""
        return sum(self.parts[name] for name in self.lasting)

    @property
    def total(self) -> int:
        """Bytes of all parts with margin and runtime."""
        return round(sum(self.parts.values()) * (1 + MARGIN_SHARE)) + RUNTIME_BYTES


def beside(trainer: Footprint, rollout: Footprint, workers: int) -> Footprint:
    """Returns the memory of one process with a trainer rank and `workers` rollout workers, each with its own base."""
    parts = {f"{name} (trainer)": size for name, size in trainer.parts.items()}
    parts |= {f"{name} (rollout)": size * workers for name, size in rollout.parts.items()}
    return Footprint(parts)


def in_one(trainer: Footprint, rollout: Footprint, *, full: bool) -> Footprint:
    """Returns the memory of a process that samples and trains: one frozen base, and activations of one kind at a time.

    With `full`, whole weights are trained, and each side has its own.
    """
    once = [name for name in trainer.parts if name == "activations" or (name == "base weights" and not full)]
    parts = {name: max(trainer.parts[name], rollout.parts[name]) for name in once}
    alone = {
        side: {n: size for n, size in footprint.parts.items() if n not in once}
        for side, footprint in (("trainer", trainer), ("rollout", rollout))
    }
    parts |= {f"{name} ({side})": size for side, own in alone.items() for name, size in own.items()}
    return Footprint(parts)


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of the tensors that exist only during training or sampling (activations)."""

    training: int
    sampling: int


@dataclass(frozen=True)
class ProcessPlan:
    """Memory that the processes of a configuration need. All sizes are in bytes."""

    model: Sizes
    trainer: Footprint
    rollout: Footprint
    host: int
    """Pinned host memory of a trainer rank; with a LoRA 0, unless `trainer.cpu_offload` is on."""
    ring: int
    """Versions that a rollout worker keeps in host memory; 0 if it keeps them on its device."""
    snapshot: int
    """Copy in host memory of what a checkpoint holds, on each trainer rank that writes one."""


@dataclass(frozen=True)
class MemoryPlan(ProcessPlan):
    """Memory that a configuration needs, with what lies in the object store."""

    model: "MetaModel"
    ticket_bytes: int
    """Images and trajectory of one ticket in the object store."""
    payload: int
    """Most that lies in the object store at the same time: tickets, a state that is kept, and weights."""
    sent_weights: int
    """The weights among that, on their way to rollout workers."""
    adapter_bytes: int
    """One version."""
    peaks: Peaks


def plan_memory(config: Config) -> MemoryPlan:
    """Plans the memory of a configuration with a layout (see `trainer_footprint`).

    Raises ValueError if the model cannot be built without weights.
    """
    # These import model code, which a driver that plans by the headers of files (node_memory.py) does not need.
    from async_flowrl.memory.meta_model import build_meta_model
    from async_flowrl.memory.peaks import remembered_training_peak, sampling_peak

    model = build_meta_model(config)
    sampling_bytes = sampling_peak(config, model)
    activations = remembered_training_peak(config)
    shapes = model.policy.shapes(config.rollout.resolution)
    sent = SENT_VERSIONS * model.version_bytes
    processes = plan_processes(config, model, activations, sampling_bytes)
    return MemoryPlan(
        model=model,
        trainer=processes.trainer,
        rollout=processes.rollout,
        host=processes.host,
        ring=processes.ring,
        snapshot=processes.snapshot,
        ticket_bytes=ticket_bytes(config, shapes),
        payload=stored_bytes(config, shapes, model.adapter_parameters) + sent,
        sent_weights=sent,
        adapter_bytes=model.version_bytes,
        peaks=Peaks(activations, sampling_bytes),
    )


def plan_processes(
    config: Config, model: Sizes, training: int = 0, sampling: int = 0, *, pinned: bool = True
) -> ProcessPlan:
    """Returns the memory of each process; `training` and `sampling` are the peak bytes of activations.

    `pinned` is as for `ring_bytes`.
    """
    return ProcessPlan(
        model=model,
        trainer=trainer_footprint(config, model, training),
        rollout=rollout_footprint(config, model, sampling),
        host=host_bytes(config, model),
        ring=ring_bytes(config, model, pinned=pinned),
        snapshot=snapshot_bytes(config, model),
    )


def trainer_footprint(config: Config, model: Sizes, activations: int = 0) -> Footprint:
    """Returns the memory of a trainer rank; `activations` is the peak of its activations in bytes.

    `trainer.shard=auto` counts as none: give a configuration with the layout that was chosen for it. The rows on which
    the KL of an optimizer step is measured are left out: latents of at most `algorithm.kl_probe_images` images at all
    trained noise levels, and the conditioning of their prompt.
    """
    trainer, vector = config.trainer, model.adapter_parameters * FLOAT32_BYTES
    joined = trainer.num_workers > 1 or trainer.cpu_offload
    sharded = joined and is_sharded(config)
    # `versions`: those retained, and two slots per stream from which versions are sent; shares are gathered in host
    # memory. `masters`, float32: the moving averages, a warm start, and a copy of the live values while a version
    # replaces them.
    versions = config.live_versions + (0 if in_shares(config) else 2 * streams(config))
    masters = moving_averages(config) + (config.lora.path is not None) + 1
    if model.full:
        whole = _full_parts(config, model, activations, versions, masters)
        return Footprint(of_one_rank(whole, model, trainer.num_workers) if sharded else whole)
    parts = {
        "base weights": model.base_bytes + model.buffer_bytes,
        "adapter and its gradient": 2 * vector,
        "optimizer": 2 * vector,
        "sum of the gradients": _sum_bytes(config, model),
        "versions of the adapter": versions * model.version_bytes + masters * vector,
        "activations": activations,
    }
    if sharded:
        parts["base weights"] = model.buffer_bytes + (0 if trainer.cpu_offload else base_share(config, model))
        parts["gathered blocks"] = model.root_bytes + MAX_GATHERED_BLOCKS * max(model.block_bytes)
    return Footprint(parts)


def _sum_bytes(config: Config, model: Sizes) -> int:
    """Returns the bytes of the int64 sum of the gradients on one rank.

    With several ranks there are two buffers: the rank's own sum and the sum over all ranks. Afterwards a buffer is used
    for the weights before the step, so these are not counted again.
    """
    return (2 if config.trainer.num_workers > 1 else 1) * model.adapter_parameters * INT64_BYTES


def _full_parts(config: Config, model: Sizes, activations: int, versions: int, masters: int) -> dict[str, int]:
    """Returns the parts of the footprint of a rank that trains all weights and holds all of them, name → bytes.

    In float32 the network computes with the masters; otherwise it has weights of its own beside them.
    """
    vector, beside_masters = model.adapter_parameters * FLOAT32_BYTES, model.itemsize < FLOAT32_BYTES
    if beside_masters:
        masters -= 1  # No copy of the live values is made while a version replaces them: the masters give them back.
    reference = build_algorithm(config).needs_reference
    return {
        "base weights": model.base_bytes + model.buffer_bytes - (0 if beside_masters else vector),
        "masters and their gradient": 2 * vector,
        "optimizer": 2 * vector,
        "sum of the gradients": _sum_bytes(config, model),
        "versions of the weights": (versions + reference) * model.version_bytes + masters * vector,
        "activations": activations,
    }


def rollout_footprint(config: Config, model: Sizes, activations: int = 0) -> Footprint:
    """Returns the memory of a rollout worker; `activations` is the peak of its activations in bytes.

    With the engine vllm_omni it is the memory on one of the worker's GPUs: the network is divided among them, and all
    other parts are counted whole, which is an upper limit.
    """
    text, where = model.text_parameters * model.itemsize, config.rollout.text_encoder
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
    """Returns the number of GPUs among which one rollout worker's network is divided."""
    return max(1, int(config.rollout.gpus_per_worker)) if config.rollout.engine == "vllm_omni" else 1
