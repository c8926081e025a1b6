"""Choice of the transport, i.e. of the way by which a run's weights are sent to the rollout workers.

The first trainer rank is asked what its device and libraries can do, because the controller itself may have neither a
GPU nor a torch with CUDA. run/job.py calls `choose_transport`.
"""

import torch

from async_flowrl.config.check import ConfigError, nccl_obstacle
from async_flowrl.config.schema import Config
from checkpoint_engine.transports import AUTO, OBJECT_STORE, resolve_transport
from separation.group import Worker, WorkerFailed
from separation.supervise import deadline


async def choose_transport(config: Config, sender: Worker) -> str:
    """Returns the name of the run's transport; `auto` is resolved by `sender`, the trainer's first rank.

    Raises ConfigError if the configured transport cannot work with the rank's device and libraries.
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
    """Returns the transport that `configured` means in this process. Raises ValueError if it cannot work here."""
    return resolve_transport(configured, "cuda" if torch.cuda.is_available() else "cpu")


def refusal(reason: str) -> ConfigError:
    return ConfigError(f"checkpoint_engine.transport: {reason}")
