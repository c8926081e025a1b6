"""Checks of `trainer.workers_per_node` and `rollout.workers_per_node` against the rest of the configuration."""

from async_flowrl.config.schema import Config


def node_obstacle(config: Config) -> str | None:
    """Returns one sentence about why workers_per_node or shard_size cannot have its value; None if nothing is wrong."""
    for pool, section in (("trainer", config.trainer), ("rollout", config.rollout)):
        each, workers = section.workers_per_node, section.num_workers
        if each is None:
            continue
        given = f"{pool}.workers_per_node={each}"
        if config.runtime.backend == "local":
            return f"{given} places processes on nodes, and runtime.backend=local has threads of one process"
        if workers % each:
            least, most = max(1, workers // each) * each, -(-workers // each) * each
            near = f"{least}" if least == most else f"{least} or {most}"
            return f"{given} must divide {pool}.num_workers={workers}: with as many on every node, {near} workers fit"
        if config.runtime.address is None and each < workers:
            return (
                f"{given} with {pool}.num_workers={workers} asks for {workers // each} nodes, and without "
                "runtime.address the run has this machine alone: start Ray on the nodes and say runtime.address=auto"
            )
    trainer = config.trainer
    size, each = trainer.shard_size, trainer.workers_per_node
    if trainer.shard == "hybrid" and size and each and each % size:
        return (
            f"trainer.shard_size={size} must divide trainer.workers_per_node={each}: ranks that hold the base between "
            "them would sit on two nodes"
        )
    return None
