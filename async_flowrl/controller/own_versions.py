"""The rollout workers of `placement=shared` as receivers: they need not be sent the versions that they make themselves.

Every worker makes each version itself, because all ranks step by the same exact sum. So a version is announced, not
sent: the worker takes it from its own trainer rank and compares it with the digest of the first rank's. Only who has
not made it, a newcomer, gets its bytes.
"""

from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.controller.endpoints import RolloutEndpoint
from async_flowrl.types import POLICY
from checkpoint_engine import RING, Ack, Header


class OwnVersions(RolloutEndpoint):
    """A worker that trains, too, as a receiver."""

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        """Raises WeightsMismatch where the worker has made something else of the version."""
        if header.stream == POLICY:
            own: Ack | None = await self._deliver("keep_own", header, slot)
            if own is not None:
                return own
        return await super().receive(header, payload, slot)


def endpoint_of(config: Config) -> type[RolloutEndpoint]:
    """How the rollout workers of this run get their versions."""
    return OwnVersions if config.placement == SHARED else RolloutEndpoint
