"""What a rollout worker must show before it may join: a loaded model with the trainer's base weights."""

from separation.group import Worker
from separation.supervise import deadline


class StartError(RuntimeError):
    """A worker came up, but it does not fit the others."""


async def load_rollout(worker: Worker, *, seconds: float) -> str:
    """Builds the worker's model; returns the digest of its base weights."""
    async with deadline(seconds, f"load: model of {worker.name}"):
        loaded = await worker.call("load")
    return str(loaded["base_digest"])


def check_base(worker: Worker, found: str, expected: str) -> None:
    """Raises StartError unless the worker's base weights are the trainer's."""
    if found != expected:
        raise StartError(
            f"{worker.name} and the trainer hold different base weights ({found} and {expected}): model.path or its "
            "revision differs between nodes"
        )
