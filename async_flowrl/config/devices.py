"""Checks of the workers that share a GPU according to the configuration, and of whether NCCL can then connect them.

NCCL refuses a group with two ranks on one device ("Duplicate GPU detected").
"""

from async_flowrl.config.elastic import bounds
from async_flowrl.config.schema import Config


def nccl_obstacle(config: Config) -> str | None:
    """Returns why NCCL cannot carry weights from the trainer to the rollout workers; None if it can.

    NCCL needs a GPU for the trainer and another one for each rollout worker.
    """
    trainer, rollout = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker
    if config.runtime.backend == "local":
        return "runtime.backend=local has all workers in one process"
    if config.placement == "shared":
        return "placement=shared has each worker make the versions that it samples with"
    if config.placement == "colocated":
        return "placement=colocated has a rollout worker and a trainer rank share each device"
    if config.rollout.engine == "vllm_omni":
        return "rollout.engine=vllm_omni receives weights in host memory"
    for key, gpus in (("trainer.gpus_per_worker", trainer), ("rollout.gpus_per_worker", rollout)):
        if gpus == 0:
            return f"{key}=0 leaves its workers on the CPU"
    if may_share(trainer, rollout):
        return f"trainer.gpus_per_worker={trainer:g} and rollout.gpus_per_worker={rollout:g} fit on one device"
    if bounds(config.rollout)[1] > 1 and may_share(rollout, rollout):
        return f"rollout.gpus_per_worker={rollout:g} lets several rollout workers share a device"
    return None


def ranks_on_one_device(config: Config) -> str | None:
    """Returns why the trainer ranks could share a GPU, which prevents their process group; None if they cannot."""
    key, gpus = "trainer.gpus_per_worker", config.trainer.gpus_per_worker
    if config.placement == "colocated" and config.rollout.gpus_per_worker > gpus:
        key, gpus = "rollout.gpus_per_worker", config.rollout.gpus_per_worker
    if config.trainer.num_workers > 1 and may_share(gpus, gpus):
        return f"{key}={gpus:g} lets two of the {config.trainer.num_workers} trainer ranks share a device"
    return None


def may_share(one: float, other: float) -> bool:
    """Returns True if workers with these shares of a GPU fit on one GPU."""
    return min(one, other) > 0 and one + other <= 1 + 1e-9
