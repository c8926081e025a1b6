"""The section `checkpoint_engine` of the configuration: the delivery of weights."""

from dataclasses import dataclass

from async_flowrl.config.settings import setting


@dataclass
class CheckpointEngineConfig:
    """The delivery of new weights from the trainer to the rollout workers."""

    transport: str = setting("object_store", choices=("object_store", "gloo", "nccl", "pynccl", "auto"))
    """Transport of the bytes: Ray's object store, or the collective transports gloo, nccl and pynccl, which broadcast.
    auto = nccl if the trainer and every rollout worker have their own GPU, else object_store."""
    retries: int = setting(3, at_least=0)
    """Retries of a delivery that failed or arrived damaged, before the worker is replaced."""
    setup_seconds: float = setting(60.0, above=0)
    """Seconds for setting up a group of a collective transport, plus 0.1 for each member."""
    ready_seconds: float = setting(10.0, above=0)
    """Seconds within which each member of a group must answer that it is ready for the next version."""
    bucket_bytes: int = setting(64 << 20, at_least=256)
    """Bytes of all trainer ranks together that the first one gathers at a time where each rank has a share of the
    weights (tune=full, trainer.shard=full). It sends from host memory, so `transport` is not nccl or pynccl then."""
    max_members: int = setting(64, at_least=1)
    """Rollout workers in one group of a collective transport, at most. If there are more, only one worker of each node
    is a member; it passes every version on to the others through the node's memory."""
