"""Checks of `placement=shared`, where each worker samples and trains, against the rest of the configuration."""

from async_flowrl.config.elastic import elastic
from async_flowrl.config.schema import Config

SHARED = "shared"
"""Value of `placement`, and name of the pool."""
SAME = ("num_workers", "workers_per_node", "gpus_per_worker", "threads")
"""Settings that must be equal for trainer and rollout, because a process belongs to both pools."""


def shared_obstacle(config: Config) -> str | None:
    """Returns one sentence about what placement=shared cannot be combined with; None if nothing stands against it."""
    if config.placement != SHARED:
        return None
    trainer, rollout = config.trainer, config.rollout
    for key in SAME:
        ours, theirs = getattr(trainer, key), getattr(rollout, key)
        if ours != theirs:
            return (
                f"placement=shared has each process be a trainer rank and a rollout worker, so trainer.{key} and "
                f"rollout.{key} must be equal, got {_said(ours)} and {_said(theirs)}"
            )
    for name in sorted(trainer.environment.keys() & rollout.environment.keys()):
        if trainer.environment[name] != rollout.environment[name]:
            return (
                f"placement=shared has one process for both pools, and {name} is {trainer.environment[name]} in "
                f"trainer.environment, {rollout.environment[name]} in rollout.environment"
            )
    if trainer.shard not in ("auto", "none") or trainer.cpu_offload:
        given = "trainer.cpu_offload=true" if trainer.cpu_offload else f"trainer.shard={trainer.shard}"
        return (
            "placement=shared samples with the base that it trains on, so each process holds all of it: "
            f"trainer.shard must be none or auto without trainer.cpu_offload, got {given}"
        )
    if elastic(rollout):
        return (
            "placement=shared has as many rollout workers as trainer ranks all the time: leave rollout.min_workers and "
            "rollout.max_workers out"
        )
    if config.checkpoint_engine.transport not in ("object_store", "auto"):
        return (
            "placement=shared sends no versions, as each worker makes them itself: checkpoint_engine.transport must be "
            f"object_store or auto, got {config.checkpoint_engine.transport}"
        )
    return None


def _said(value: object) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else f"{value}"
