"""Host memory that each process of a run needs on one of its nodes, for node_memory.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.host_memory import in_shares
from async_flowrl.memory.host_needs import (
    PROCESS_BYTES,
    SENT,
    copying_ranks,
    rollout_parts,
    shared_parts,
    trainer_parts,
)
from async_flowrl.memory.least_memory import least_of_rank, least_of_rollout
from async_flowrl.memory.nodes import Hosts, NodeProcesses
from async_flowrl.memory.processes import ProcessPlan, plan_processes
from async_flowrl.memory.sizes import StoredSizes
from async_flowrl.policies.registry import DTYPES

GIB = 2**30
PROCESS = "process"
"""Name of the part of a process that is not its model."""
MIN_PART_SHARE = 0.02
"""Smallest share of a process's memory at which a message names a part of it."""


@dataclass(frozen=True)
class Need:
    """Host memory of one process of a node."""

    title: str
    parts: Mapping[str, int]
    """Name of a part → bytes, as planned."""
    least: int = 0
    """Bytes that it needs in any case, however wrong the plan is."""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = {name: size for name, size in self.parts.items() if size > MIN_PART_SHARE * self.total}
        parts = ", ".join(f"{name} {gib(size)}" for name, size in shown.items())
        return f"{self.title} {gib(self.total)}" + (f" ({parts})" if shown.keys() - {PROCESS} else "")


def sizes_of(config: Config, hosts: Hosts) -> StoredSizes:
    """Returns the sizes of the run's model by the headers of its files. Raises ValueError as StoredSizes."""
    return StoredSizes.of(config, hosts.stored, DTYPES[config.model.dtype].itemsize)


def on_gpus(config: Config, hosts: Hosts, pool: str) -> bool:
    """Returns True if the workers of the trainer or rollout pool have GPUs."""
    own = config.rollout.engine == "vllm_omni" and config.rollout.gpus_per_worker > 0
    return pool in hosts.devices or (pool == ROLLOUT and own)


def needs_on(config: Config, hosts: Hosts, node: NodeProcesses) -> list[Need]:
    """Returns the need of each process on a node, trainer ranks first. The largest parts have a name of their own."""
    plan = plan_processes(config, sizes_of(config, hosts), pinned=on_gpus(config, hosts, ROLLOUT))
    ranks = node.workers.get(TRAINER, ())
    needs = [rank_need(config, hosts, plan, rank) for rank in ranks]
    if config.placement != SHARED:
        on_gpu = on_gpus(config, hosts, ROLLOUT)
        parts = {PROCESS: PROCESS_BYTES, **rollout_parts(config, plan, on_gpus=on_gpu)}
        least = least_of_rollout(config, plan.model, on_gpu=on_gpu)
        needs += [Need("rollout worker", parts, least) for _ in node.workers.get(ROLLOUT, ())]
    others = {name: of for name, of in node.workers.items() if name not in (TRAINER, ROLLOUT)}
    for name, workers in others.items():
        title = "reward worker" if is_scoring_pool(name) else "reward server"
        needs += [Need(title, {PROCESS: PROCESS_BYTES})] * len(workers)
    if node.controller:
        # Its own memory is needed at the end, when no rank has a copy for a checkpoint any more.
        copies = sum(rank < copying_ranks(config) for rank in ranks) * plan.snapshot
        written = max(0, _written(config, plan) - copies)
        needs.append(Need("controller", {PROCESS: PROCESS_BYTES, "weights that it writes": written}))
    needs = [replace(need, parts={name: size for name, size in need.parts.items() if size}) for need in needs]
    return _in_one_process(needs) if config.runtime.backend == "local" else needs


def rank_need(config: Config, hosts: Hosts, plan: ProcessPlan, rank: int) -> Need:
    """Returns the need of a trainer rank, or with `placement=shared` of the process that samples and trains."""
    on_gpu, copies, sends = on_gpus(config, hosts, TRAINER), rank < copying_ranks(config), rank == 0
    shared = config.placement == SHARED
    planned = (shared_parts if shared else trainer_parts)(config, plan, on_gpus=on_gpu)
    parts = {name: size for name, size in planned.items() if sends or name != SENT}
    return Need(
        "process that samples and trains" if shared else "trainer rank",
        {PROCESS: PROCESS_BYTES, **parts, "copy for a checkpoint": plan.snapshot if copies else 0},
        least_of_rank(config, plan.model, on_gpu=on_gpu, sends=sends, copies=copies),
    )


def processes_on(config: Config, node: NodeProcesses) -> int:
    """Returns the number of the run's processes on a node."""
    if config.runtime.backend == "local":
        return 1
    workers = {name: of for name, of in node.workers.items() if config.placement != SHARED or name != ROLLOUT}
    return sum(map(len, workers.values())) + node.controller


def total_need(config: Config, hosts: Hosts, node: NodeProcesses) -> int:
    """Returns the bytes that all processes of a node need as planned."""
    return sum(need.total for need in needs_on(config, hosts, node))


def gib(size: int) -> str:
    """Returns bytes in GiB, with three digits."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"


def _written(config: Config, plan: ProcessPlan) -> int:
    """Returns the host memory in which the controller writes the trained weights at the end of a run.

    It has the whole transformer in the dtype of the network, and float32 copies of what is trained unless that lies in
    shares, of which it reads one tensor at a time.
    """
    if config.tune != FULL:
        return 0
    masters = 0 if in_shares(config) else 2 * 4 * plan.model.adapter_parameters
    return plan.model.base_bytes + masters


def _in_one_process(needs: Sequence[Need]) -> list[Need]:
    """Returns the needs of workers that are threads of one process."""
    more = [replace(need, parts={n: size for n, size in need.parts.items() if n != PROCESS}) for need in needs]
    return [Need(PROCESS, {PROCESS: PROCESS_BYTES}), *(need for need in more if need.total)]
