"""Comparison of placements by the memory that a configuration's processes would need with each, on the same devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.processes import Footprint, MemoryPlan, in_one, trainer_footprint

GIB = 2**30


@dataclass(frozen=True)
class Placed:
    """Processes of one placement on their devices."""

    placement: str
    processes: dict[str, int]
    """Kind of process → bytes that it needs, with margin and runtime."""
    fits: bool

    def sentence(self) -> str:
        """Returns whether the placement fits, with the GiB of each kind of process."""
        needs = ", ".join(f"{title} {size / GIB:.1f}" for title, size in self.processes.items())
        return f"{self.placement} {'fits' if self.fits else 'does not fit'} ({needs})"


def by_placement(plan: MemoryPlan, config: Config, device_gib: float) -> list[Placed]:
    """Returns each placement that the rollout engine allows, on devices of `device_gib` GiB.

    A process may use its share of a device (`gpus_per_worker`). With `shared` each process holds all of the base,
    whatever `trainer.shard` is.
    """
    device = round(device_gib * GIB)
    return [
        Placed(name, {title: one.total for title, (one, _) in processes.items()}, _fit(processes, device))
        for name, processes in _processes(plan, config)
    ]


def _fit(processes: dict[str, tuple[Footprint, float]], device: int) -> bool:
    return all(one.total <= round(device * (min(1.0, share) or 1.0)) for one, share in processes.values())


def _processes(plan: MemoryPlan, config: Config) -> Iterator[tuple[str, dict[str, tuple[Footprint, float]]]]:
    """Yields placement → kind of process → (memory, GPUs)."""
    trainer, rollout = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker
    yield "separate", {"trainer rank": (plan.trainer, trainer), "rollout worker": (plan.rollout, rollout)}
    if config.rollout.engine != "diffusers":
        return
    whole = replace(config, placement=SHARED, trainer=replace(config.trainer, shard="none", cpu_offload=False))
    rank = trainer_footprint(whole, plan.model, plan.peaks.training)
    yield SHARED, {"process with one base": (in_one(rank, plan.rollout, full=plan.model.full), max(trainer, rollout))}


def describe_placements(plan: MemoryPlan, config: Config, device_gib: float) -> str:
    """Returns one sentence on all placements, memory in GiB."""
    said = "; ".join(placed.sentence() for placed in by_placement(plan, config, device_gib))
    return f"by placement, GiB of a device of {device_gib:g}: {said}"
