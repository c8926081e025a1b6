"""Receiving end of a rollout worker with `placement=shared`, which takes versions from the trainer rank of its process.

All ranks step by the same exact sum, so each makes every version itself. A version is therefore announced, not sent:
the rollout worker takes it from its own trainer rank and compares its digest with that of the first rank's version. If
its rank has not made the version, e.g. in a process that has just joined, the bytes are sent to it.
"""

from typing import Any

from async_flowrl.config.schema import SHARED, Config
from async_flowrl.controller.endpoints import RolloutEndpoint
from async_flowrl.types import POLICY
from checkpoint_engine import RING, Ack, Header


class OwnVersions(RolloutEndpoint):
    """Receiver in a process that also trains; only versions that its trainer rank has not made are sent to it."""

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        """Delivers the version and returns the worker's acknowledgement.

        Raises WeightsMismatch if the process's own trainer rank has made other weights of this version, and the errors
        of RolloutEndpoint.
        """
        if header.stream == POLICY:
            own: Ack | None = await self._deliver("keep_own", header, slot)
            if own is not None:
                return own
        return await super().receive(header, payload, slot)


def endpoint_of(config: Config) -> type[RolloutEndpoint]:
    """Returns the class of the rollout workers' receiving ends for this `config`."""
    return OwnVersions if config.placement == SHARED else RolloutEndpoint
