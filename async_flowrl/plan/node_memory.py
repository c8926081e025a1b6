"""Comparison of the planned host memory with the nodes of a run, made before its models are loaded.

`async_flowrl.main` hands `check_hosts` to the run. Everything is counted from the headers of the model's files, without
activations, object store and models of rewards; importing this module loads no model code.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from async_flowrl.config.check import ConfigError
from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.plan.changes import Change
from async_flowrl.plan.host_memory import in_shares
from async_flowrl.plan.host_needs import PROCESS_BYTES, copying_ranks, rollout_bytes, shared_bytes, trainer_bytes
from async_flowrl.plan.memory import MARGIN_SHARE, ProcessPlan, plan_processes
from async_flowrl.plan.sizes import StoredSizes
from async_flowrl.policies.registry import DTYPES
from async_flowrl.run.hosts import Hosts, NodeProcesses

logger = logging.getLogger(__name__)

GIB = 2**30
MAX_SETTINGS_SHOWN = 3
"""Most settings that a message names."""
MIN_PART_SHARE = 0.02
"""Smallest share of a process's memory at which a message names a part of it."""


@dataclass(frozen=True)
class Need:
    """Host memory of one process of a node: name of a part → bytes."""

    title: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    def __str__(self) -> str:
        shown = [(name, size) for name, size in self.parts if size > MIN_PART_SHARE * self.total]
        parts = ", ".join(f"{name} {gib(size)}" for name, size in shown)
        return f"{self.title} {gib(self.total)}" + (f" ({parts})" if len(shown) > 1 else "")


def check_hosts(config: Config, hosts: Hosts) -> list[str]:
    """Returns a warning for each node whose free memory is less than what its processes will take.

    Raises ConfigError if what they need, without margin, exceeds all memory of a node, unless `allow_oom` is set. Any
    other failure, such as a model whose tensors have other names than `full.freeze`, becomes a warning, because the run
    may still succeed.
    """
    try:
        return [sentence for node in hosts.nodes if (sentence := compared(config, hosts, node)) is not None]
    except ConfigError:
        raise
    except Exception as error:
        logger.info("no plan of the nodes' memory", exc_info=True)
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return [f"the nodes' memory was not compared with a plan: {why}"]


def compared(config: Config, hosts: Hosts, node: NodeProcesses) -> str | None:
    """Returns a sentence on a node without enough free memory, else None. Raises ConfigError as `check_hosts` does."""
    needs = needs_on(config, hosts, node)
    needed = sum(need.total for need in needs)
    coming = needed - processes_on(config, node) * PROCESS_BYTES  # which the processes have taken already
    refused = needed / (1 + MARGIN_SHARE) > node.memory.total
    if not refused and coming <= node.memory.free:
        return None
    rows = Counter(map(str, needs))
    listed = "; ".join(row if count == 1 else f"{count} × {row}" for row, count in rows.items())
    if not refused:
        there = f"{gib(node.memory.free)} GiB of memory free, and the processes of this run on it may take"
        return f"node {node.address} has {there} {gib(coming)} GiB more: {listed}; {advice(config, hosts, node)}"
    there = f"{gib(node.memory.total)} GiB of memory, and the processes of this run on it need"
    sentence = f"node {node.address} has {there} {gib(needed)} GiB: {listed}; {advice(config, hosts, node)}"
    if not config.allow_oom:
        raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
    return sentence


def needs_on(config: Config, hosts: Hosts, node: NodeProcesses) -> list[Need]:
    """Returns the need of each process on a node, trainer ranks first. The largest parts have a name of their own."""
    sizes = StoredSizes.of(config, hosts.stored, DTYPES[config.model.dtype].itemsize)
    plan, on_gpus, shared = plan_processes(config, sizes), hosts.on_gpus, config.placement == SHARED
    arriving = "versions that arrive", plan.ring
    ranks, rollouts = node.workers.get(TRAINER, ()), node.workers.get(ROLLOUT, ())
    copying = [rank for rank in ranks if rank < copying_ranks(config)]
    needs = []
    for rank in ranks:
        copy = "copy for a checkpoint", plan.snapshot if rank in copying else 0
        unsent = plan.host if on_gpus and config.trainer.gpus_per_worker > 0 and not _sends(config, rank) else 0
        if shared:
            whole = shared_bytes(config, plan, on_gpus=on_gpus) - unsent
            needs.append(_need("process that samples and trains", whole, arriving, copy))
        else:
            whole = trainer_bytes(config, plan, on_gpus=on_gpus) - unsent
            needs.append(_need("trainer rank", whole, ("", 0), copy))
    if not shared:
        whole = rollout_bytes(config, plan, on_gpus=on_gpus)
        needs += [_need("rollout worker", whole, arriving) for _ in rollouts]
    others = sum(len(of) for name, of in node.workers.items() if name not in (TRAINER, ROLLOUT))
    needs += [Need("reward worker", (("process", PROCESS_BYTES),))] * others
    if node.controller:
        # Its own memory is needed at the end, when no rank has a copy for a checkpoint any more.
        written = max(0, _written(config, plan) - len(copying) * plan.snapshot)
        needs.append(_need("controller", PROCESS_BYTES, ("", 0), ("the weights that it writes", written)))
    return _in_one_process(needs) if config.runtime.backend == "local" else needs


def _need(title: str, whole: int, inside: tuple[str, int], beside: tuple[str, int] = ("", 0)) -> Need:
    """Returns the need of a process of `whole` bytes, in which the part `inside` is counted and `beside` is not."""
    rest = max(0, whole - inside[1] - PROCESS_BYTES)
    parts = ("process", PROCESS_BYTES), ("weights, optimizer and versions", rest), inside, beside
    return Need(title, tuple(part for part in parts if part[1]))


def _sends(config: Config, rank: int) -> bool:
    """Whether a rank pins what `ProcessPlan.host` says: the first one alone sends weights that lie in no shares."""
    return rank == 0 or config.tune != FULL or in_shares(config)


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
    more = [replace(need, parts=tuple(part for part in need.parts if part[0] != "process")) for need in needs]
    return [Need("process", (("process", PROCESS_BYTES),)), *(need for need in more if need.total)]


def processes_on(config: Config, node: NodeProcesses) -> int:
    """Returns the number of the run's processes on a node."""
    if config.runtime.backend == "local":
        return 1
    workers = {name: of for name, of in node.workers.items() if config.placement != SHARED or name != ROLLOUT}
    return sum(map(len, workers.values())) + node.controller


def advice(config: Config, hosts: Hosts, node: NodeProcesses) -> str:
    """Returns a clause with up to three settings that make the processes fit the node, or come nearest to it.

    Settings that cost least speed or accuracy come first; each is named with the GiB that would then be needed.
    """
    limit = min(node.memory.total, node.memory.free + processes_on(config, node) * PROCESS_BYTES)
    now, after = _total(config, hosts, node), dict[Change, int]()
    for change in smaller(config, hosts, node):
        if change.accepted(config) and (needed := _total(change.applied(config), hosts, _after(change, node))) < now:
            after[change] = needed
    fitting = [change for change in after if after[change] <= limit]
    chosen = fitting or sorted(after, key=lambda change: after[change])
    listed = ", ".join(f"{change} ({gib(after[change])} GiB)" for change in chosen[:MAX_SETTINGS_SHOWN])
    if not listed:
        return "no single setting would make it less"
    return f"{'it would fit' if fitting else 'it would be less, though not little enough,'} with {listed}"


def smaller(config: Config, hosts: Hosts, node: NodeProcesses) -> Iterator[Change]:
    """Yields settings that may lower the host memory of a node's processes."""
    trainer, rollouts = config.trainer, len(node.workers.get(ROLLOUT, ()))
    if config.versions_on_host and hosts.on_gpus:
        yield Change("rollout.versions_on", "device")
    if config.rollout.text_encoder == "cached" and hosts.on_gpus:
        yield Change("rollout.text_encoder", "resident")
    if config.tune == FULL and trainer.num_workers > 1 and not in_shares(config):
        yield Change("trainer.shard", "full")
    if config.model.dtype == "float32":
        yield Change("model.dtype", "bfloat16")
    if config.max_staleness > 0:
        yield Change("max_staleness", 0)
    if trainer.ema_decay is not None:
        yield Change("trainer.ema_decay", None)
    if rollouts > 1 and config.placement != SHARED:
        yield Change("rollout.num_workers", config.rollout.num_workers - rollouts // 2)


def _after(change: Change, node: NodeProcesses) -> NodeProcesses:
    """Returns the node with fewer rollout workers, if the change asks for fewer; they are then taken from this node."""
    if change.key != "rollout.num_workers":
        return node
    rollouts = node.workers[ROLLOUT]
    return replace(node, workers={**node.workers, ROLLOUT: rollouts[: len(rollouts) - len(rollouts) // 2]})


def _total(config: Config, hosts: Hosts, node: NodeProcesses) -> int:
    return sum(need.total for need in needs_on(config, hosts, node))


def gib(size: int) -> str:
    """Returns bytes in GiB, with three digits."""
    return f"{size / GIB:,.0f}" if size >= 100 * GIB else f"{size / GIB:.3g}"
