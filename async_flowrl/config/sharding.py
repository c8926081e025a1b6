"""Number of trainer ranks that share the base or, with tune=full, all weights, from the configuration alone."""

from async_flowrl.config.schema import Config


def is_sharded(config: Config) -> bool:
    """Returns True if the ranks of a process group share the base, and with tune=full all weights.

    `trainer.shard=auto` was replaced by what it means on the run's devices (memory/layout.py) before; where nobody has
    done that, each rank holds all.
    """
    return config.trainer.cpu_offload or config.trainer.shard in ("full", "hybrid")


def ranks_per_replica(config: Config, ranks: int, *, sharded: bool) -> int:
    """Returns the number of ranks that share one copy of the base; 1 if it is not sharded.

    With `trainer.shard=auto` these are the ranks of one node, if `trainer.workers_per_node` is above 1, so that blocks
    are gathered inside a node.
    """
    trainer = config.trainer
    if not sharded:
        return 1
    if trainer.shard == "auto" and trainer.workers_per_node and trainer.workers_per_node > 1:
        return trainer.workers_per_node
    return (trainer.shard_size or ranks) if trainer.shard == "hybrid" else ranks


def in_shares(config: Config) -> bool:
    """Returns True if each trainer rank has a share of what it trains (tune=full with trainer.shard=full)."""
    return config.tune == "full" and config.trainer.num_workers > 1 and is_sharded(config)
