"""The canary: random weights with which a new rollout worker proves that they are attached to the right modules."""

from dataclasses import dataclass
from typing import Any

from async_flowrl.controller.endpoints import PUBLISHING
from checkpoint_engine import CANARY_VERSION, Header
from separation.group import Worker


@dataclass
class Canary:
    """Random weights under version -1; a new worker must compute the same with them as the trainer before it serves."""

    header: Header
    payload: Any
    """The weights' bytes, or a reference to them in the object store."""
    probe: dict[str, Any]
    """Results of the trainer's network with these weights (checkpoint_engine/binding_proof.py)."""

    @classmethod
    async def of(cls, rank: Worker) -> "Canary":
        """Has a trainer rank make the canary; every rank makes the same one."""
        probe = await rank.call("sender.canary")
        header = await rank.call("sender.policy.seal", CANARY_VERSION, lane=PUBLISHING)
        _, (payload,) = await rank.call_split("sender.policy.payload", CANARY_VERSION, returns=2, lane=PUBLISHING)
        return cls(header, payload, probe)

    async def again(self, rank: Worker) -> "Canary":
        """Has a trainer rank send the payload once more, for the case that the node that held it is lost."""
        _, (payload,) = await rank.call_split("sender.canary_again", returns=2, lane=PUBLISHING)
        return Canary(self.header, payload, self.probe)
