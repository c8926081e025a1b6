"""Tests of what a Delivery counts as a fall-back of its collective transport, in virtual time.

Publisher, receivers, Delivery and CollectiveBroadcast are the real ones; only the link between them is made up.
"""

import asyncio
from typing import Any

import pytest

from checkpoint_engine import EVALUATION, RING, Ack, Delivery, Header, Publisher, Receiver
from checkpoint_engine.base import Draft, depth, parents
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.process_group import Epoch
from separation.group import RefLost
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, End, Gone, Sender, blank, flipped
from tests.unit.checkpoint_engine.engine_virtual import Rig, failing

READY_SECONDS, SENDER_SECONDS = 10.0, 30.0
EPSILON = 0.001
NAMES = ("a", "b")


class Link:
    """A sender's end of the collective; a version arrives at all members a second after it was sent."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.sent: dict[int, asyncio.Event] = {}

    def arrived(self, version: int) -> asyncio.Event:
        return self.sent.setdefault(version, asyncio.Event())


class GroupSender(Sender):
    """A sender that can also broadcast; for `ready_after[version]` seconds it is busy with something else."""

    def __init__(self, publisher: Publisher) -> None:
        super().__init__(publisher)
        self.link = Link(publisher)
        self.opened, self.broadcast = 0, list[int]()
        self.ready_after: dict[int, float] = {}

    async def address(self) -> tuple[str, int]:
        return "host", 1

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        self.opened += 1

    async def draft(self, version: int) -> Draft:
        return self.publisher.draft(version)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await asyncio.sleep(self.ready_after.get(draft.version, 0.0))

    async def send(self, draft: Draft) -> None:
        await asyncio.sleep(1.0)
        self.publisher.seal(draft.version)
        self.broadcast.append(draft.version)
        self.link.arrived(draft.version).set()

    async def abort_group(self) -> None: ...


class GroupEnd(End):
    """A receiver that can join groups: it says that it is ready after `ready_after[version]` seconds."""

    def __init__(self, receiver: Receiver, name: str, link: Link) -> None:
        super().__init__(receiver, name)
        self.link = link
        self.ready_after: dict[int, float] = {}
        self.evaluation_seconds = 0.0
        self.damaged: set[int] = set()

    async def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        if slot == EVALUATION:
            await asyncio.sleep(self.evaluation_seconds)
        return await super().receive(header, payload, slot)

    async def open_group(self, epoch: Epoch, rank: int) -> None: ...

    async def ready(self, epoch: int, draft: Draft) -> None:
        await asyncio.sleep(self.ready_after.get(draft.version, 0.0))

    async def accept(self, draft: Draft) -> Ack:
        await self.link.arrived(draft.version).wait()
        header, data = self.link.publisher.payload(draft.version)
        return self.receiver.receive(header, flipped(data, 3) if draft.version in self.damaged else data)

    async def abort_group(self) -> None: ...


class GroupRig(Rig):
    """A delivery whose receivers `NAMES` form a group."""

    def __init__(self) -> None:
        super().__init__()
        self.sender: GroupSender = GroupSender(Publisher(self.tensors, alpha=ALPHA, rank=RANK, retain=self.capacity))
        self.broadcast = CollectiveBroadcast(self.sender, ready_seconds=READY_SECONDS, sender_seconds=SENDER_SECONDS)
        self.delivery = Delivery(self.sender, replace=self.replace, options=self.options, broadcast=self.broadcast)
        self.members: dict[str, GroupEnd] = {}

    async def join_all(self) -> None:
        for name in NAMES:
            receiver = Receiver(blank(self.tensors), alpha=ALPHA, rank=RANK, capacity=self.capacity)
            self.ends[name] = self.members[name] = GroupEnd(receiver, name, self.sender.link)
            assert await self.delivery.join(self.members[name])

    @property
    def counts(self) -> tuple[int, int]:
        return self.delivery.stats.fallbacks, self.delivery.stats.member_busy

    def check_served(self, newest: int) -> None:
        """Every receiver holds `newest` and would compute with its bytes; nobody was replaced."""
        header, _ = self.sender.publisher.payload(newest)
        for member in self.members.values():
            assert self.held(member.name) == [newest - 1, newest]
            assert member.receiver.activate("policy", newest) == header.digest == live_digest(member.receiver)
        assert self.replaced == []


async def test_while_every_receiver_is_busy_nothing_has_failed() -> None:
    rig = GroupRig()
    await rig.join_all()
    await rig.publish(0)
    for member in rig.members.values():
        member.evaluation_seconds = 5.0
    await rig.delivery.place(0)
    await rig.publish(1)
    assert rig.counts == (0, 1) and rig.sender.broadcast == [0]
    await rig.publish(2)
    assert rig.counts == (0, 1) and rig.sender.broadcast == [0, 2] and rig.sender.opened == 1
    rig.check_served(2)


async def test_damage_in_a_broadcast_is_cured_by_the_store_and_the_group_stays() -> None:
    rig = GroupRig()
    await rig.join_all()
    rig.members["b"].damaged = {1}
    await rig.publish(0, 1)
    assert (rig.counts, rig.broadcast.failures, rig.sender.opened) == ((1, 0), 0, 1)
    rig.check_served(1)


@pytest.mark.parametrize(("late", "fallbacks"), [(-EPSILON, 0), (EPSILON, 1)])
async def test_an_answer_within_its_limit_is_in_time_and_one_after_it_costs_one_version(
    late: float, fallbacks: int
) -> None:
    """Everybody is served in either case, and the next version goes by the collective again."""

    rig = GroupRig()
    await rig.join_all()
    await rig.publish(0)
    rig.members["b"].ready_after[1] = READY_SECONDS + late
    began = asyncio.get_running_loop().time()
    await rig.publish(1)
    assert asyncio.get_running_loop().time() - began >= READY_SECONDS - EPSILON, "nobody was late"
    assert rig.counts == (fallbacks, 0) and rig.broadcast.failures == fallbacks
    assert rig.sender.broadcast == ([0] if fallbacks else [0, 1])
    rig.check_served(1)
    await rig.publish(2)
    assert rig.counts == (fallbacks, 0) and rig.sender.broadcast[-1] == 2
    assert rig.sender.opened == 1 + fallbacks
    rig.check_served(2)


@pytest.mark.parametrize(("late", "fallbacks"), [(-EPSILON, 0), (EPSILON, 1)])
async def test_a_sender_that_seals_something_else_has_its_own_limit(late: float, fallbacks: int) -> None:
    rig = GroupRig()
    await rig.join_all()
    rig.sender.ready_after[0] = SENDER_SECONDS + late
    await rig.publish(0, 1)
    assert rig.counts == (fallbacks, 0) and rig.broadcast.failures == fallbacks
    assert rig.sender.broadcast == ([1] if fallbacks else [0, 1])
    rig.check_served(1)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 100])
@pytest.mark.parametrize("each", [1, 4])
def test_no_node_sends_a_payload_to_more_than_two_others(nodes: int, each: int) -> None:
    """Whatever their number: each node that is sent to costs a copy on the sending node's link."""
    where: dict[str | None, str] = {f"w{i}": f"n{i // each}" for i in range(nodes * each)}
    plan = parents({name: node for name, node in where.items() if name is not None})
    sent_to: dict[str, set[str]] = {}
    for name, parent in plan.items():
        source = where.get(parent, "sender")
        if source != where[name]:
            sent_to.setdefault(source, set()).add(where[name])
    assert len(sent_to["sender"]) == min(2, nodes) and max(map(len, sent_to.values())) <= 2
    assert set().union(*sent_to.values()) == set(where.values()), "everybody is reached"
    assert max(depth(plan, name) for name in plan) <= nodes.bit_length()


@pytest.mark.parametrize("capacity", [1, 2])
async def test_a_receiver_that_lags_behind_the_one_above_it_gets_old_versions_from_the_sender(capacity: int) -> None:
    """The one above it has gone on to newer versions by then and retains the old ones no more."""

    async def stuck(attempt: int, header: Any, payload: Any) -> Any:
        await asyncio.sleep(20.0 * (header.version == 0))
        return payload

    rig = Rig(capacity=capacity)
    for i in range(3):
        await rig.join(f"w{i}", stuck if i == 2 else None, f"n{i}")
    for version in range(6):
        await rig.delivery.publish(version)
        await asyncio.sleep(2.0)
        assert rig.held("w0")[-1:] == [version] and rig.held("w2") == [], "only the slow one waits"
    await rig.delivery.drain()
    newest = list(range(6))[-capacity:]
    assert rig.held("w2") == rig.held("w0") == newest and rig.replaced == []
    assert rig.delivery.stats.fallbacks == 5 - capacity


async def test_a_payload_that_is_lost_with_the_node_that_passed_it_on_comes_from_the_sender() -> None:
    rig = Rig()
    for i in range(3):
        await rig.join(f"w{i}", failing(1, lambda: RefLost("a value is gone")) if i == 2 else None, f"n{i}")
    await rig.publish(0)
    assert rig.held("w2") == [0] and rig.ends["w0"].relayed == [0]
    assert rig.replaced == [] and rig.delivery.stats.retries == 1


async def test_fan_out_serves_neighbours_from_leaders_and_survives_a_dead_one() -> None:
    rig = Rig(max_fan_out=4, replacing=False)
    for i in range(12):
        await rig.join(f"w{i}", failing(1, Gone) if i == 1 else None, f"n{i % 3}")
    await rig.publish(0)
    assert rig.replaced == [("w1", "Gone")]
    assert all(rig.held(f"w{i}") == [0] for i in range(12) if i != 1)
    relays = {name: len(end.relayed) for name, end in rig.ends.items() if end.relayed}
    assert relays == {"w0": 1, "w2": 1}
    assert len(rig.sender.served) == 1
    assert rig.delivery.stats.publishes == 1 and rig.delivery.stats.seconds == pytest.approx(0.1)
