"""Vocabulary of a delivery: what travels, the protocols of its two ends, its options and its counts."""

from dataclasses import dataclass
from typing import Any, Protocol

from checkpoint_engine.digest import combine
from checkpoint_engine.fanout import MAX_FAN_OUT, NODE_FAN_OUT
from checkpoint_engine.layout import Layout

RING = "ring"
"""Slot kind: the newest `capacity` versions of each stream."""
EVALUATION = "evaluation"
"""Slot kind: one version beside the ring, which only the next evaluation version replaces."""


@dataclass(frozen=True)
class Draft:
    """What a payload is, while its bytes are not digested yet. Picklable, some tens of kilobytes."""

    stream: str
    version: int
    layout: Layout
    alpha: float | None
    rank: int | None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def sealed(self, digests: tuple[bytes, ...]) -> "Header":
        """The header of bytes with these digests."""
        parts = (self.stream, self.version, self.layout, self.alpha, self.rank, digests)
        return Header(*parts, digest=_identity(*parts))


@dataclass(frozen=True)
class Header(Draft):
    """What a payload is and what its bytes must be."""

    digests: tuple[bytes, ...]
    """16 bytes per tensor, in layout order."""
    digest: str
    """SHA-256 (hex) over everything above: with `version` it is the identity of these weights."""

    def is_consistent(self) -> bool:
        """Whether the total digest belongs to the other fields."""
        parts = (self.stream, self.version, self.layout, self.alpha, self.rank, self.digests)
        return len(self.digests) == len(self.layout.entries) and self.digest == _identity(*parts)


@dataclass(frozen=True)
class Ack:
    """A receiver's word that it verified and retains a version."""

    stream: str
    version: int
    digest: str
    slot: str = RING


@dataclass(frozen=True)
class Activation:
    """What the live tensors hold."""

    stream: str
    version: int
    digest: str


class SenderEndpoint(Protocol):
    """The publishing side as a controller sees it: a `Publisher` in this process, a thread or another machine."""

    async def stage(self, version: int) -> None:
        """Copies the tensors; returns when they may change again."""

    async def seal(self, version: int) -> Header: ...

    async def payload(self, version: int) -> Any:
        """The version's bytes, or whatever stands for them and receivers can be given. Raises VersionGone."""

    async def hold(self, version: int) -> None:
        """Retains a version, however many newer ones come, until `release`."""

    async def release(self, version: int) -> None: ...


class ReceiverEndpoint(Protocol):
    """One receiver as a controller sees it."""

    name: str
    node: str
    """Receivers on one node can hand payloads to each other."""

    async def receive(self, header: Header, payload: Any, slot: str) -> Ack: ...

    async def relay(self, header: Header, slot: str) -> Any:
        """A payload made of the version that this receiver retains, for its neighbours."""


@dataclass(frozen=True)
class DeliveryOptions:
    """`deadline` in seconds, for each single call to an end; `retain` versions can be asked for by joiners."""

    retries: int = 3
    deadline: float = 30.0
    retain: int = 2
    max_fan_out: int = MAX_FAN_OUT
    node_fan_out: int = NODE_FAN_OUT


@dataclass
class DeliveryStats:
    """Counts since the start; seconds by the loop's clock. `seconds` runs from staged to acknowledged by all."""

    publishes: int = 0
    bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    acknowledged: int = 0
    retries: int = 0
    corrupt: int = 0
    fallbacks: int = 0
    replaced: int = 0


def _identity(
    stream: str, version: int, layout: Layout, alpha: float | None, rank: int | None, digests: tuple[bytes, ...]
) -> str:
    return combine([stream, str(version), layout.hash, repr(alpha), repr(rank), *digests])
