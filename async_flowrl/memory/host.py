"""Host memory of a run's processes, and its comparison with the nodes before models are loaded.

Counted are the bytes of tensors that last, by the headers of the model's files, without activations, object store and
models of rewards.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from async_flowrl.config.check import ConfigError
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER
from async_flowrl.memory.footprints import (
    GIB,
    aside_bytes,
    host_bytes,
    in_one,
    ring_bytes,
    rollout_footprint,
    snapshot_bytes,
    trainer_footprint,
)
from async_flowrl.memory.model_sizes import Sizes
from separation.node import NodeMemory

FOLDER_BYTES = 200_000_000  # Size of a run directory without checkpoints: logs, metrics, images, report.
# Most copies of a LoRA's state at a time: on its first rank two that are retained, and one that is packed
# (training/checkpoint.py).
KEPT_BY_RANK = 3


@dataclass(frozen=True)
class NodeProcesses:
    address: str
    memory: NodeMemory
    workers: dict[str, list[int]]  # Pool → indices of its workers there.


def rank_bytes(config: Config, model: Sizes, *, on_gpu: bool, sends: bool = True) -> int:
    """Returns the bytes of a trainer rank, with `placement=shared` of a process that samples too, without its copy.

    `sends` is for a rank that sends versions. On a GPU they are pinned buffers. Versions that may never be held
    are left out.
    """
    shared, aside = placement_of(config).together, aside_bytes(config, model)
    if on_gpu:
        pinned = host_bytes(config, model, certain=True) if sends or not model.full else 0
        return aside + pinned + (rollout_bytes(config, model, on_gpu=True) if shared else 0)
    trainer = trainer_footprint(config, model)
    if not shared:
        gathered = host_bytes(config, model, certain=True) if sends and model.full and config.in_shares else 0
        return aside + trainer.resident + gathered
    both = in_one(trainer, rollout_footprint(config, model), full=model.full)
    return aside + both.resident + ring_bytes(config, model, pinned=False, certain=True)


def rollout_bytes(config: Config, model: Sizes, *, on_gpu: bool) -> int:
    """Returns the bytes of a rollout worker, on a GPU those kept aside; no versions that may never be held."""
    ring = ring_bytes(config, model, pinned=on_gpu, certain=True)
    if not on_gpu:
        return ring + rollout_footprint(config, model).resident
    aside = {"resident": 0, "offload": model.text_bytes, "cached": model.base_bytes}
    return ring + aside[config.rollout.text_encoder]


def copying_ranks(config: Config) -> int:
    return config.trainer.num_workers if config.in_shares else 1


def copied_bytes(config: Config, model: Sizes) -> int:
    return snapshot_bytes(config, model) * (KEPT_BY_RANK if config.keeps_state else 1)


def check_hosts(config: Config, model: Sizes, nodes: Iterable[NodeProcesses], on_gpus: Container[str]) -> Iterator[str]:
    """Yields a warning for each node with less free memory than its processes will take; `on_gpus`: `host_needs`.

    Raises ConfigError for a node without so much memory and swap space, unless `allow_oom` is set.
    """
    for node in nodes:
        needs = list(host_needs(config, model, node.workers, on_gpus))
        memory, need = node.memory, sum(size for _, size in needs)
        refused = need > memory.total + memory.swap
        if not refused and need <= memory.free:
            continue
        has = memory.total + memory.swap if refused else memory.free
        rows = Counter(f"{title} {size / GIB:.3g}" for title, size in needs)
        listed = "; ".join(row if count == 1 else f"{count} × {row}" for row, count in rows.items())
        sentence = (
            f"node {node.address} has {has / GIB:.3g} GiB of memory {'and swap space' if refused else 'free'}, and the "
            f"processes of this run on it need at least {need / GIB:.3g}: {listed}; fewer workers on a node, or "
            "max_staleness=0, need less"
        )
        if refused and not config.allow_oom:
            raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
        yield sentence


def check_disk(config: Config, model: Sizes, folder: Path) -> Iterator[str]:
    """Yields a warning if the disk of the run directory has no room for its checkpoints and weights."""
    # It holds the kept checkpoints, one more being written, a best one, and the weights of both.
    best, free = config.save.best is not None, disk_usage(folder).free
    checkpoints = (config.save.keep + 1 + best) * snapshot_bytes(config, model) * copying_ranks(config)
    need = FOLDER_BYTES + (1 + best) * model.version_bytes + checkpoints
    if need > free:
        yield (
            f"the disk of {folder} has {free / GIB:.3g} GiB free, and checkpoints, weights and logs need about "
            f"{need / GIB:.3g}: free some, or lower save.keep"
        )


def host_needs(
    config: Config, model: Sizes, workers: Mapping[str, Collection[int]], on_gpus: Container[str]
) -> Iterator[tuple[str, int]]:
    """Yields name and bytes of each process that holds a part of the model, of workers (pool → their indices).

    `on_gpus` has the pools whose workers have GPUs; rollout workers of vllm_omni need not be among them.
    """
    for rank in workers.get(TRAINER, ()):
        size = rank_bytes(config, model, on_gpu=TRAINER in on_gpus, sends=rank == 0)
        yield "trainer rank", size + copied_bytes(config, model) * (rank < copying_ranks(config))
    if not placement_of(config).together:
        own_process = config.rollout.engine == "vllm_omni" and config.rollout.gpus_per_worker > 0
        for _ in workers.get(ROLLOUT, ()):
            yield "rollout worker", rollout_bytes(config, model, on_gpu=own_process or ROLLOUT in on_gpus)
