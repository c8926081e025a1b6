"""Choice of the transport that carries the weights of a run.

Only the trainer's first rank knows its device and its libraries: the controller needs neither a GPU nor a torch that
knows one.
"""

import torch

from async_flowrl.config.check import ConfigError
from async_flowrl.config.devices import nccl_obstacle
from async_flowrl.config.schema import Config
from checkpoint_engine.transports import AUTO, OBJECT_STORE, resolve_transport
from separation.group import Worker, WorkerFailed
from separation.supervise import deadline


async def choose_transport(config: Config, sender: Worker) -> str:
    """The transport of this run, `auto` resolved where the weights are. `sender`: the trainer's first rank.

    Raises ConfigError, one sentence, for one that cannot work with its device and its libraries.
    """
    configured = config.checkpoint_engine.transport
    if configured == AUTO and nccl_obstacle(config):
        return OBJECT_STORE
    try:
        async with deadline(config.deadlines.load, f"load: choice of the transport on {sender.name}"):
            transport: str = await sender.call("async_flowrl.run.transport:transport_here", configured)
    except WorkerFailed as error:
        if error.kind != ValueError.__name__:
            raise
        raise refusal(error.message) from error
    return transport


def transport_here(configured: str) -> str:
    """What the configured transport is in this process. Raises ValueError where it cannot work here."""
    return resolve_transport(configured, "cuda" if torch.cuda.is_available() else "cpu")


def refusal(reason: str) -> ConfigError:
    return ConfigError(f"checkpoint_engine.transport: {reason}")
