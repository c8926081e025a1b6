"""Needs of a configuration: memory, disks and stores of the machines it runs on, by the planner's arithmetic."""

from dataclasses import dataclass

from async_flowrl.algorithms.ema import samples_from_average
from async_flowrl.config.reward_pools import reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.plan.memory import FLOAT32_BYTES, RUNTIME_BYTES, Footprint, MemoryPlan, plan_memory

PROCESS_BYTES = 700_000_000
"""Host memory of a process beside its model, Python with torch and diffusers: `ps` shows 530 to 710 MB on a CPU."""
FOLDER_BYTES = 200_000_000
"""Of a run directory without checkpoints: logs, metrics, images, report."""


@dataclass(frozen=True)
class Process:
    """`count` processes of a pool that need `bytes` of host memory each."""

    pool: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Needs:
    """In bytes. `store` waits in the object stores at once, of all nodes together."""

    processes: tuple[Process, ...]
    store: int
    run_directory: int
    model_files: int
    version: int
    """One version of the adapter, as it is sent to rollout workers."""

    @property
    def memory(self) -> int:
        """Host memory of all processes; what waits in the object stores is extra."""
        return sum(process.count * process.bytes for process in self.processes)

    @property
    def largest(self) -> Process:
        return max(self.processes, key=lambda process: process.bytes)


def needs_of(config: Config, *, on_gpus: bool) -> Needs:
    """Of a whole run. Raises ValueError where the model cannot be built without its weights."""
    plan = plan_memory(config)
    processes = [
        Process("trainer", config.trainer.num_workers, trainer_bytes(config, plan, on_gpus=on_gpus)),
        Process("rollout", config.rollout.num_workers, rollout_bytes(config, plan, on_gpus=on_gpus)),
        *(Process(pool.name, pool.workers, PROCESS_BYTES) for pool in reward_pools(config.reward)),
        Process("controller", 1, PROCESS_BYTES),
    ]
    return Needs(
        processes=tuple(processes),
        store=plan.payload,
        run_directory=run_directory_bytes(config, plan),
        model_files=model_bytes(config, plan),
        version=plan.adapter_bytes,
    )


def trainer_bytes(config: Config, plan: MemoryPlan, *, on_gpus: bool) -> int:
    """On a GPU what is offloaded to the host; on a CPU all that would be on a device."""
    if on_gpus and config.trainer.gpus_per_worker > 0:
        return PROCESS_BYTES + plan.host
    return PROCESS_BYTES + on_host(plan.trainer)


def rollout_bytes(config: Config, plan: MemoryPlan, *, on_gpus: bool) -> int:
    """On a GPU the text encoder that `rollout.text_encoder=offload` keeps on the host, or with cached the network while
    an encoder has its place; on a CPU everything."""
    if on_gpus and config.rollout.gpus_per_worker > 0:
        text = plan.model.text_parameters * plan.model.itemsize
        return (
            PROCESS_BYTES
            + {"resident": 0, "offload": text, "cached": plan.model.base_bytes}[config.rollout.text_encoder]
        )
    return PROCESS_BYTES + on_host(plan.rollout)


def on_host(footprint: Footprint) -> int:
    """Of a footprint whose device is the host: there is no runtime of CUDA."""
    return footprint.total - footprint.processes * RUNTIME_BYTES


def run_directory_bytes(config: Config, plan: MemoryPlan) -> int:
    """The newest checkpoints, the one under way and the best one; the LoRA, and what else a run writes."""
    return (
        FOLDER_BYTES
        + plan.adapter_bytes
        + (config.save.keep + 1 + (config.save.best is not None)) * (checkpoint_bytes(config, plan))
    )


def checkpoint_bytes(config: Config, plan: MemoryPlan) -> int:
    """Weights and both moments of Adam in float32, averages where the run has them, and every retained version."""
    averages = (config.trainer.ema_decay is not None) + samples_from_average(
        config.algorithm.name, config.algorithm.old_policy_decay
    )
    vectors = (3 + averages) * plan.model.adapter_parameters * FLOAT32_BYTES
    return vectors + config.live_versions * plan.adapter_bytes


def model_bytes(config: Config, plan: MemoryPlan) -> int:
    """Of the pipeline's weights in the dtype that is computed with."""
    model = plan.model
    return model.base_bytes + (model.text_parameters + model.vae_parameters) * model.itemsize
