"""Bounds of an elastic rollout pool, i.e. of one whose size may change during a run, and the checks of these bounds."""

from async_flowrl.config.schema import Config, RolloutConfig


def elastic(rollout: RolloutConfig) -> bool:
    """Returns True if the pool's size may change during a run."""
    return rollout.min_workers is not None or rollout.max_workers is not None


def bounds(rollout: RolloutConfig) -> tuple[int, int]:
    """Returns the smallest and the largest number of workers of the pool."""
    fixed = rollout.num_workers
    return (
        fixed if rollout.min_workers is None else rollout.min_workers,
        fixed if rollout.max_workers is None else rollout.max_workers,
    )


def elastic_obstacle(config: Config) -> str | None:
    """Returns one sentence about why min_workers or max_workers cannot have its value; None if nothing is wrong."""
    rollout = config.rollout
    if not elastic(rollout):
        return None
    (least, most), workers = bounds(rollout), rollout.num_workers
    key = "min_workers" if rollout.max_workers is None else "max_workers"
    given = f"rollout.{key}={getattr(rollout, key)}"
    if least > most:
        return f"rollout.min_workers={least} must be at most rollout.max_workers={most}"
    if least > workers:
        return (
            f"rollout.min_workers={least} must be at most rollout.num_workers={workers}, the size that is planned for"
        )
    if most < workers:
        return (
            f"rollout.max_workers={most} must be at least rollout.num_workers={workers}, the size that is planned for"
        )
    if config.runtime.backend == "local":
        return f"{given} follows the nodes of a cluster, and runtime.backend=local has threads of one process"
    if config.runtime.address is None:
        return (
            f"{given} follows the nodes of a cluster, and without runtime.address the run has this machine alone: "
            "start Ray on the nodes and say runtime.address=auto"
        )
    if rollout.workers_per_node is not None:
        return (
            f"{given} seats worker by worker, and rollout.workers_per_node={rollout.workers_per_node} whole nodes at "
            "the start: leave one of them out"
        )
    return None
