"""Types of a delivery: its messages, the protocols of its sender and receivers, its options and its counts.

A *stream* is a sequence of versions of the same tensors. To *seal* a version is to fix its bytes by their digests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from checkpoint_engine.digest import combine
from checkpoint_engine.layout import Layout
from checkpoint_engine.process_group import Epoch

MAX_FAN_OUT = 32
"""Largest number of receivers that one process serves on each level of the tree."""
NODE_FAN_OUT = 2
"""Largest number of nodes to which one node sends a payload; each of them costs one copy over the network."""
RING = "ring"
"""Kind of slot in a receiver: the ring holds the newest `capacity` versions of each stream."""
EVALUATION = "evaluation"
"""Kind of slot in a receiver: it holds one version beside the ring, which only the next evaluation version replaces."""


@dataclass(frozen=True)
class Draft:
    """Description of a version without digests yet; picklable. `alpha` and `rank` are those of a LoRA, else None."""

    stream: str
    version: int
    layout: Layout
    alpha: float | None
    rank: int | None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def title(self) -> str:
        return f"version {self.version} of stream {self.stream}"

    def sealed(self, digests: tuple[bytes, ...]) -> "Header":
        scaling = repr(self.alpha), repr(self.rank)
        digest = combine([self.stream, str(self.version), self.layout.hash, *scaling, *digests])
        return Header(self.stream, self.version, self.layout, self.alpha, self.rank, digests, digest)


@dataclass(frozen=True)
class Header(Draft):
    """Description of a sealed version, by which a receiver verifies the bytes that arrive."""

    digests: tuple[bytes, ...]
    """16 bytes per tensor, in layout order."""
    digest: str
    """SHA-256 (hex) over all other fields; it identifies these weights."""

    def is_consistent(self) -> bool:
        return len(self.digests) == len(self.layout.entries) and self.digest == self.sealed(self.digests).digest


@dataclass(frozen=True)
class Ack:
    stream: str
    version: int
    digest: str
    slot: str = RING


@dataclass(frozen=True)
class Activation:
    """The version that is in a receiver's live tensors, i.e. in the tensors that the network computes with."""

    stream: str
    version: int
    digest: str


class SenderEndpoint(Protocol):
    """The sender as a Delivery calls it, wherever its `Publisher` is; it limits its own waits and names who is late."""

    async def stage(self, version: int) -> None:
        """Copies the tensors aside as `version`; returns when they may change again."""

    async def seal(self, version: int) -> Header:
        """Digests a staged version and returns its header. Raises VersionGone if it is not staged or retained."""

    async def payload(self, version: int) -> Any:
        """Returns a version's bytes or a reference to them, perhaps after a wait. VersionGone if it is not retained."""

    async def hold(self, version: int) -> None:
        """Retains a version, regardless of newer ones, until `release` is called for it."""

    async def release(self, version: int) -> None: ...

    # Only for a delivery with a CollectiveBroadcast; behind them is a CollectiveSender (collective.py).
    async def address(self) -> tuple[str, int]: ...
    async def open_group(self, epoch: Epoch, rank: int) -> None: ...
    async def draft(self, version: int) -> Draft: ...
    async def ready(self, epoch: int, draft: Draft) -> None: ...
    async def send(self, draft: Draft) -> None:
        """Broadcasts the version and seals it meanwhile."""

    async def abort_group(self) -> None:
        """Aborts the group; it must be possible while `send` is under way."""


class ReceiverEndpoint(Protocol):
    """One receiver as a Delivery calls it; behind it is a `Receiver`. `name` is unique among the receivers."""

    name: str
    node: str
    """Name of the machine. Receivers with the same node can pass payloads on to each other."""

    async def receive(self, header: Header, payload: Any, slot: str) -> Ack:
        """Verifies and retains a version. Raises TransferCorrupted or WeightsMismatch, as `Receiver.receive` does."""

    async def relay(self, header: Header, slot: str) -> Any:
        """Returns a payload of a version that this receiver retains, to be sent to other receivers."""

    # Only for a delivery with a CollectiveBroadcast; behind them is a CollectiveReceiver (collective.py).
    async def open_group(self, epoch: Epoch, rank: int) -> None: ...
    async def ready(self, epoch: int, draft: Draft) -> None: ...
    async def accept(self, draft: Draft) -> Ack: ...
    async def abort_group(self) -> None: ...


@dataclass(frozen=True)
class DeliveryOptions:
    """Options of a Delivery: `retries` of a version, the seconds of one call of a receiver, versions to `retain`."""

    retries: int = 3
    deadline: float = 30.0
    retain: int = 2
    max_fan_out: int = MAX_FAN_OUT
    node_fan_out: int = NODE_FAN_OUT


@dataclass
class DeliveryStats:
    """Sums over all deliveries since the start; seconds are by the event loop's clock."""

    publishes: int = 0
    bytes: int = 0
    """Size of the published versions; a version counts once, not per receiver."""
    seconds: float = 0.0
    """Seconds from staged to acknowledged by all receivers."""
    retries: int = 0
    corrupt: int = 0
    fallbacks: int = 0
    """Versions that the collective transport failed to bring to its members, and payloads that were not passed on."""
    member_busy: int = 0
    """Versions for which the collective transport was not used, because a member was busy with an earlier delivery."""


def parents(
    nodes: Mapping[str, str],
    holders: Mapping[str, str] = MappingProxyType({}),
    *,
    max_fan_out: int = MAX_FAN_OUT,
    node_fan_out: int = NODE_FAN_OUT,
) -> dict[str, str | None]:
    """Returns receiver → the receiver from which it gets the payload; None stands for the sender.

    `nodes` is receiver → its node. `holders` (node → receiver) have the payload already and serve their own nodes. The
    other nodes form a tree: the sender serves the first receiver of `node_fan_out` nodes, each of these serves the
    first receiver of as many further nodes, and so on. On a node, the first one serves the others, in a tree of width
    `max_fan_out`. If its nodes have at most `max_fan_out` receivers together, the sender serves all of these itself.
    """
    by_node: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_node.setdefault(node, []).append(name)
    plan: dict[str, str | None] = {}
    for node in by_node.keys() & holders.keys():
        plan |= _levels(by_node.pop(node), holders[node], max_fan_out)
    others = list(by_node.values())
    direct = sum(len(names) for names in others[:node_fan_out]) <= max_fan_out
    plan |= _levels([names[0] for names in others], None, node_fan_out)
    for index, (leader, *neighbours) in enumerate(others):
        if direct and index < node_fan_out:
            plan |= dict.fromkeys(neighbours)
        else:
            plan |= _levels(neighbours, leader, max_fan_out)
    return plan


def depth(plan: Mapping[str, str | None], name: str) -> int:
    """Returns the number of receivers through which the payload passes before it reaches `name`."""
    hops = 0
    while (above := plan.get(name)) is not None:
        name, hops = above, hops + 1
    return hops


def leaders(nodes: Mapping[str, str]) -> list[str]:
    """Returns the first receiver of each node, in the order of `nodes` (receiver → its node)."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        first.setdefault(node, name)
    return list(first.values())


def _levels(names: list[str], root: str | None, width: int) -> dict[str, str | None]:
    return {name: root if i < width else names[i // width - 1] for i, name in enumerate(names)}
