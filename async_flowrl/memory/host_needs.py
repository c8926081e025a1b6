"""Host memory of each process of a run, from the memory plan, for the doctor and for the check before a run starts."""

from dataclasses import dataclass

from async_flowrl.config.elastic import bounds
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.host_memory import in_shares
from async_flowrl.memory.processes import RUNTIME_BYTES, Footprint, ProcessPlan, in_one

PROCESS_BYTES = 700_000_000
"""Host memory of a process without its model: Python, torch and diffusers; `ps` shows 530 to 710 MB on a CPU."""
RETAINED = 2
"""States of a LoRA that its first rank (training/snapshots.py) and the controller (controller/kept_state.py) retain."""
SENT = "versions to send"
"""Name of the buffers from which a trainer rank sends whole weights."""


@dataclass(frozen=True)
class Process:
    """`count` processes of a pool with which a run can start, each of which needs `bytes` of host memory."""

    pool: str
    count: int
    bytes: int
    per_node: int = 1
    """Number of the processes that one node must hold (`workers_per_node`)."""
    later: int = 0
    """Number of further processes that may join while the run goes on, in a pool with `max_workers`."""
    copies: int = 0
    """Number of the processes that copy their state to host memory for a checkpoint, which is not in `bytes`."""
    copy: int = 0
    """Bytes of such a copy."""

    @property
    def total(self) -> int:
        """Bytes of all processes of the pool at the start of the run."""
        return self.count * self.bytes + self.copies * self.copy

    @property
    def on_a_node(self) -> int:
        """Bytes that one node must have for its processes of the pool, if those that copy are on it."""
        return self.per_node * self.bytes + min(self.per_node, self.copies) * self.copy


def training_processes(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> list[Process]:
    """Returns the trainer ranks and rollout workers; with `placement=shared`, the processes that are both."""
    trainer, rollout = config.trainer, config.rollout
    copies = {"copies": copying_ranks(config), "copy": kept_bytes(config, plan) or plan.snapshot}
    if config.placement == SHARED:
        of_both = shared_bytes(config, plan, on_gpus=on_gpus)
        return [Process(SHARED, trainer.num_workers, of_both, trainer.workers_per_node or 1, **copies)]
    of_a_trainer = trainer_bytes(config, plan, on_gpus=on_gpus)
    of_a_rollout = rollout_bytes(config, plan, on_gpus=on_gpus)
    least, most = bounds(rollout)
    return [
        Process("trainer", trainer.num_workers, of_a_trainer, trainer.workers_per_node or 1, **copies),
        Process("rollout", least, of_a_rollout, rollout.workers_per_node or 1, later=most - least),
    ]


def trainer_bytes(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> int:
    """Returns the host memory of a trainer worker in bytes, without the copy that becomes a checkpoint."""
    return PROCESS_BYTES + sum(trainer_parts(config, plan, on_gpus=on_gpus).values())


def rollout_bytes(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> int:
    """Returns the host memory of a rollout worker in bytes."""
    return PROCESS_BYTES + sum(rollout_parts(config, plan, on_gpus=on_gpus).values())


def shared_bytes(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> int:
    """Returns the host memory, in bytes, of a process that samples and trains, without the copy for a checkpoint."""
    return PROCESS_BYTES + sum(shared_parts(config, plan, on_gpus=on_gpus).values())


def trainer_parts(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> dict[str, int]:
    """Returns name of a part → bytes of the host memory of a trainer worker, without the process itself.

    A trainer worker on a GPU has only pinned buffers in host memory, one on a CPU everything. Whole versions that are
    gathered from shares are beside the rank's own.
    """
    if on_gpus and config.trainer.gpus_per_worker > 0:
        return {SENT if plan.model.full else "offloaded base": plan.host}
    sent = {SENT: plan.host} if in_shares(config) else {}
    return {"weights, optimizer and versions": on_host(plan.trainer), **sent}


def kept_bytes(config: Config, plan: ProcessPlan) -> int:
    """Returns the bytes of the newest states of a LoRA, which the first rank and the controller retain; else 0."""
    return 0 if config.tune == FULL else RETAINED * plan.snapshot


def copying_ranks(config: Config) -> int:
    """Returns the number of trainer ranks that copy their state to host memory for a checkpoint or a kept state.

    These are all ranks if each has a share of what it trains, otherwise the first one.
    """
    return config.trainer.num_workers if in_shares(config) else 1


def rollout_parts(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> dict[str, int]:
    """Returns name of a part → bytes of the host memory of a rollout worker, without the process itself.

    On a CPU, everything is in host memory. On a GPU worker, host memory holds the versions with
    `rollout.versions_on=host`, the text encoder with `rollout.text_encoder=offload`, and with `cached` the network
    while an encoder is on the GPU.
    """
    parts = {"versions that arrive": plan.ring}
    if not (on_gpus and config.rollout.gpus_per_worker > 0):
        return {**parts, "weights": on_host(plan.rollout)}
    aside = {
        "resident": {},
        "offload": {"text encoders": plan.model.text_parameters * plan.model.itemsize},
        "cached": {"network, put aside": plan.model.base_bytes},
    }
    return parts | aside[config.rollout.text_encoder]


def shared_parts(config: Config, plan: ProcessPlan, *, on_gpus: bool) -> dict[str, int]:
    """Returns name of a part → bytes of the host memory of a process that samples and trains, without the process.

    On a GPU it is what both kinds need on the host; on a CPU it is everything, with one base for both kinds.
    """
    if on_gpus and config.trainer.gpus_per_worker > 0:
        return trainer_parts(config, plan, on_gpus=True) | rollout_parts(config, plan, on_gpus=True)
    both = in_one(plan.trainer, plan.rollout, full=plan.model.full)
    return {"versions that arrive": plan.ring, "weights, optimizer and versions": on_host(both)}


def on_host(footprint: Footprint) -> int:
    """Returns the bytes of a footprint on the host, without the CUDA runtime."""
    return footprint.total - RUNTIME_BYTES
