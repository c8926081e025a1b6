"""Checks, from the configuration alone, that NCCL can connect the processes which it is meant to connect.

NCCL connects the trainer ranks with each other, and the rank that sends the weights with the rollout workers. It
refuses a group in which two processes use the same GPU ("Duplicate GPU detected"), so most checks ask whether a GPU
could be shared. A share is `gpus_per_worker`: Ray may put two workers on one GPU if their shares sum to at most 1.
"""

from async_flowrl.config.elastic import bounds
from async_flowrl.config.schema import Config


def nccl_obstacle(config: Config) -> str | None:
    """Returns why NCCL cannot carry weights from the trainer to the rollout workers; None if nothing here prevents it.

    The rank that sends and every rollout worker need a GPU each, all of them different. Whether NCCL is installed is
    checked elsewhere.
    """
    trainer, rollout = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker
    if config.runtime.backend == "local":
        return "runtime.backend=local has all workers in one process"
    if config.placement == "shared":
        return "with placement=shared no weights are sent: each worker trains the weights that it samples with"
    if config.versions_on_host:
        return "rollout workers keep their versions in host memory (rollout.versions_on)"
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
    """Returns why two trainer ranks could be put on one GPU; None if they cannot be.

    NCCL would refuse their process group.
    """
    gpus = config.trainer.gpus_per_worker
    if config.trainer.num_workers > 1 and may_share(gpus, gpus):
        ranks = f"two of the {config.trainer.num_workers} trainer ranks"
        return f"trainer.gpus_per_worker={gpus:g} lets {ranks} share a device"
    return None


def may_share(one: float, other: float) -> bool:
    """Returns True if two workers with these shares of a GPU fit on one GPU; a share of 0 is a worker on the CPU.

    The tolerance is for sums of decimal fractions, e.g. 0.7 + 0.3.
    """
    return min(one, other) > 0 and one + other <= 1 + 1e-9
