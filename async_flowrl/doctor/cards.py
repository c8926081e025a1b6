"""Finding on GPUs: whether the memory plan of each pool fits the devices of the nodes where its workers may sit."""

import math
from collections.abc import Mapping, Sequence

from async_flowrl.config.check import ConfigError
from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.doctor.findings import OK, SKIPPED, WARNING, Finding, failed
from async_flowrl.doctor.machines import GIB, Machine, room_for
from async_flowrl.memory.devices import check_devices
from async_flowrl.memory.layout import resolved
from separation.group import PoolSpec

NAME = "devices"


def devices(config: Config, wanted: Sequence[PoolSpec], machines: Sequence[Machine]) -> Finding:
    """Compares the memory plan of each pool with the GPUs that its workers can get.

    The finding is a failure if even a pool's largest GPUs are too small. It is a warning if the plan fits only some of
    the GPUs, because Ray chooses among them when the workers start.
    """
    if not any(machine.facts["gpus"] for machine in machines):
        return Finding(NAME, SKIPPED, "no GPU: everything runs on CPUs", "nothing to plan")
    offered = {spec.name: sizes for spec in wanted if judged(spec, config) and (sizes := offers(spec, machines))}
    if not offered:
        return Finding(NAME, SKIPPED, "no pool of the plan gets a GPU", "nothing to plan")
    counts = {spec.name: math.ceil(spec.least * spec.gpus_per_worker) for spec in wanted}
    largest = {pool: sizes[min(counts[pool], len(sizes)) - 1][0] for pool, sizes in offered.items()}
    smallest = {pool: sizes[-1][0] for pool, sizes in offered.items()}
    try:
        warnings = check_devices(resolved(config, largest).applied(config), largest)
    except ConfigError as error:
        return failed(NAME, error, "a run would refuse it with this sentence")
    try:
        warnings = check_devices(resolved(config, smallest).applied(config), smallest)
    except ConfigError as error:
        small = {name for pool, sizes in offered.items() for size, name in sizes if size < largest[pool]}
        sentence = f"on the smaller GPUs of {', '.join(sorted(small))}: {error}"
        return Finding(NAME, WARNING, sentence, "keep the pools off them: ray start --num-gpus there, as many as fit")
    if warnings:
        return Finding(NAME, WARNING, "; ".join(warnings), "a run says this, too")
    count = sum(len(machine.facts["gpus"]) for machine in machines)
    return Finding(NAME, OK, f"{count} GPUs, the smallest {said(smallest)}: the plan fits")


def judged(spec: PoolSpec, config: Config) -> bool:
    """Returns True if the memory plan covers the pool and its workers use a GPU; vllm_omni plans its memory itself."""
    known = spec.name in (TRAINER, SHARED) or is_scoring_pool(spec.name)
    return spec.gpus_per_worker > 0 and (known or (spec.name == ROLLOUT and config.rollout.engine != "vllm_omni"))


def offers(spec: PoolSpec, machines: Sequence[Machine]) -> list[tuple[int, str]]:
    """Returns (bytes, name of the node) of each GPU on nodes that can hold the pool's workers, the largest first."""
    fitting = room_for(spec, machines)
    return sorted(((int(gpu["memory"]), one.name) for one in fitting for gpu in one.facts["gpus"]), reverse=True)


def said(smallest: Mapping[str, int]) -> str:
    """Returns `of 80.0 GiB`, or the sizes by pool if they differ."""
    if len(set(smallest.values())) == 1:
        return f"of {next(iter(smallest.values())) / GIB:.1f} GiB"
    return ", ".join(f"for {pool} of {size / GIB:.1f} GiB" for pool, size in smallest.items())
