"""Host memory of the processes beside what lies on devices: versions to send, versions received, and a snapshot.

The snapshot is the copy of a trainer rank's state that is written as a checkpoint beside the next step. Versions to
send count as pinned, also on a CPU, where a small one takes less.
"""

from async_flowrl.algorithms.ema import samples_from_average
from async_flowrl.config.schema import Config
from async_flowrl.config.sharding import is_sharded, ranks_per_replica
from async_flowrl.memory.sizes import Sizes
from checkpoint_engine.pinned_memory import pinned_bytes

FLOAT32_BYTES = 4


def base_share(config: Config, model: Sizes) -> int:
    """Returns the bytes of one rank's share of a frozen base that is shared."""
    return -(-model.base_bytes // ranks_per_replica(config, config.trainer.num_workers, sharded=True))


def in_shares(config: Config) -> bool:
    """Returns True if each trainer rank has a share of what it trains (tune=full with trainer.shard=full)."""
    return config.tune == "full" and config.trainer.num_workers > 1 and is_sharded(config)


def host_bytes(config: Config, model: Sizes) -> int:
    """Returns the bytes that a trainer rank pins: an offloaded base, or with tune=full versions that are sent.

    A LoRA's versions are small and left out. The first rank alone sends; what it gathers from shares is not pinned.
    """
    if not model.full:
        return base_share(config, model) if config.trainer.cpu_offload else 0
    version = model.version_bytes if in_shares(config) else pinned_bytes(model.version_bytes)
    return sent_versions(config) * version


def sent_versions(config: Config) -> int:
    """Returns the largest number of versions for which a sending rank has buffers.

    For each stream these are the newest `live_versions`, one that is being sealed, and one that is held for its
    evaluation. If the policy itself is evaluated, because there is no EMA, one more can be held for the next evaluation
    before the first is released. Of versions in shares, they are the newest one of each stream, one that is being
    gathered, and of both streams together one that is gathered once more.
    """
    if in_shares(config):
        return 2 * streams(config) + 1
    held_twice = config.trainer.ema_decay is None and config.evaluate.every > 0
    return streams(config) * (config.live_versions + 2) + held_twice


def received_versions(config: Config) -> int:
    """Returns the versions that a rollout worker has room for beside the live one.

    The ring of each stream has one slot for each version that a ticket may name. There is one slot for evaluation, and
    one version is being received.
    """
    return streams(config) * config.live_versions + 1 + 1


def ring_bytes(config: Config, model: Sizes, *, pinned: bool = True) -> int:
    """Returns the bytes of the versions that a rollout worker keeps in host memory.

    `pinned` is for a worker with a GPU, where a small version takes more than its own size.
    """
    if not config.versions_on_host:
        return 0
    return received_versions(config) * (pinned_bytes(model.version_bytes) if pinned else model.version_bytes)


def snapshot_bytes(config: Config, model: Sizes) -> int:
    """Returns the bytes of the copy that a trainer rank makes of the state for a checkpoint.

    The state is the masters and both Adam moments in float32, the moving averages if there are any, and all kept
    versions. A rank that has a share of it copies only that share.
    """
    whole = (
        3 + moving_averages(config)
    ) * model.adapter_parameters * FLOAT32_BYTES + config.live_versions * model.version_bytes
    return -(-whole // (config.trainer.num_workers if in_shares(config) else 1))


def streams(config: Config) -> int:
    """Returns the number of streams: the policy, and its moving average (EMA) if there is one."""
    return 2 if config.trainer.ema_decay is not None else 1


def moving_averages(config: Config) -> int:
    """Returns the number of moving averages of the trained weights: for evaluations, and that rollouts sample from."""
    averaged = samples_from_average(config.algorithm.name, config.algorithm.old_policy_decay)
    return streams(config) - 1 + averaged
