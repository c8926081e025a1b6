"""Tests of the controller's part of collective deliveries: their members, when they begin, and their order."""

import asyncio
from typing import Any

import pytest

from checkpoint_engine import Ack, Publisher
from checkpoint_engine.base import Draft
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.errors import MemberBusy, TransferFailed
from checkpoint_engine.process_group import Epoch
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, lora


class Ends:
    """A sender and a receiver that only note what is asked of them, by virtual time: 1 s per collective."""

    node = "n0"

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.publisher = Publisher(lora(), alpha=ALPHA, rank=RANK)
        self.log: list[tuple[str, int]] = []

    async def address(self) -> tuple[str, int]:
        return "host", 1

    async def open_group(self, epoch: Epoch, rank: int) -> None:
        self.log.append(("open", rank))

    async def draft(self, version: int) -> Draft:
        return self.publisher.draft(version)

    async def ready(self, epoch: int, draft: Draft) -> None:
        await asyncio.sleep(0.1)
        self.log.append(("ready", draft.version))

    async def send(self, draft: Draft) -> None:
        self.log.append(("send", draft.version))
        await asyncio.sleep(1.0)
        self.log.append(("sent", draft.version))

    async def accept(self, draft: Draft) -> Ack:
        await asyncio.sleep(1.0)
        return Ack(draft.stream, draft.version, "digest")

    async def receive(self, header: Any, payload: Any, slot: str) -> Ack:
        raise AssertionError("nothing goes by the store here")

    async def relay(self, header: Any, slot: str) -> Any:
        raise AssertionError("nothing goes by the store here")

    async def abort_group(self) -> None:
        self.log.append(("abort", -1))


async def test_deliveries_that_share_a_broadcast_enter_its_collectives_one_after_the_other() -> None:
    both = Ends()
    broadcast = CollectiveBroadcast(both)
    found = await asyncio.gather(*(broadcast(version, [both]) for version in (1, 2)))
    assert [result["a"] for result in found] == [Ack("policy", version, "digest") for version in (1, 2)]
    sent = [entry for entry in both.log if entry[0] in ("send", "sent")]
    assert sent == [("send", 1), ("sent", 1), ("send", 2), ("sent", 2)]
    assert both.log[:2] == [("open", 0), ("open", 1)] and both.log.count(("open", 1)) == 1


async def test_the_sender_enters_only_when_every_member_has_said_that_it_is_ready() -> None:
    both = Ends()
    await CollectiveBroadcast(both)(1, [both])
    assert [entry[0] for entry in both.log] == ["open", "open", "ready", "ready", "send", "sent"]


@pytest.mark.parametrize("late", ["ready", "accept", "send"])
async def test_a_member_that_never_answers_ends_in_an_abort_and_no_acknowledgement(late: str) -> None:
    async def for_ever(*_: Any) -> None:
        await asyncio.sleep(1e6)

    both = Ends()
    setattr(both, late, for_ever)
    broadcast = CollectiveBroadcast(both)
    results = await broadcast(1, [both])
    assert not isinstance(results["a"], Ack) or late == "send"
    assert asyncio.get_running_loop().time() < 45.0
    assert ("abort", -1) in both.log and broadcast.failures == 1


class Dead(Ends):
    async def open_group(self, epoch: Epoch, rank: int) -> None:
        raise ConnectionResetError("the peer is gone")


def epochs(sender: Ends) -> int:
    return sender.log.count(("open", 0))


async def test_a_newcomer_is_served_one_by_one_and_taken_in_when_nothing_is_under_way() -> None:
    sender, one, other = Ends("sender"), Ends("a"), Ends("b")
    broadcast = CollectiveBroadcast(sender)

    await broadcast(1, [one])
    await broadcast.regroup([one])
    assert epochs(sender) == 1, "nobody has come"
    assert list(await broadcast(2, [one, other])) == ["a"] and epochs(sender) == 1
    await broadcast.regroup([one, other])
    assert epochs(sender) == 2
    assert sorted(await broadcast(3, [other, one])) == ["a", "b"] and epochs(sender) == 2
    await broadcast.regroup([one, other, Dead("c")])
    assert sorted(await broadcast(4, [other, one])) == ["a", "b"]
    assert (epochs(sender), broadcast.failures) == (4, 1)


async def test_an_abort_that_overtakes_the_opening_is_repeated_so_that_no_lane_waits_in_vain() -> None:
    class Waiting(Ends):
        """It begins to open 10 ms after it was told to, and then waits for its peers until it is aborted."""

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.aborted = asyncio.Event()
            self.turned_back = False

        async def open_group(self, epoch: Epoch, rank: int) -> None:
            await asyncio.sleep(0.01)
            self.aborted = asyncio.Event()
            await self.aborted.wait()
            self.turned_back = True
            raise TransferFailed("aborted")

        async def abort_group(self) -> None:
            self.aborted.set()

    sender, living = Waiting("sender"), Waiting("a")
    results = await CollectiveBroadcast(sender)(1, [living, Dead("b")])
    assert {type(error) for error in results.values()} == {ConnectionResetError}
    assert sender.turned_back and living.turned_back
    assert asyncio.get_running_loop().time() < 1.0


async def test_who_has_left_is_left_out_of_the_next_group_and_nothing_has_failed() -> None:
    sender, one, other = Ends("sender"), Ends("a"), Ends("b")
    broadcast = CollectiveBroadcast(sender)

    await broadcast(1, [one, other])
    again = Ends("b")  # a new process by the same name
    assert sorted(await broadcast(2, [one, again])) == ["a", "b"] and again.log[0] == ("open", 2)
    assert list(await broadcast(3, [one])) == ["a"]
    assert (epochs(sender), broadcast.failures) == (3, 0)


async def test_while_a_member_is_busy_versions_go_one_by_one_and_the_group_stays() -> None:
    sender, one, other = Ends("sender"), Ends("a"), Ends("b")
    broadcast = CollectiveBroadcast(sender)

    await broadcast(1, [one, other])
    with pytest.raises(MemberBusy, match=r"^busy with an earlier delivery: b$"):
        await broadcast(2, [one], [other])
    await broadcast.regroup([one])
    assert sorted(await broadcast(3, [one, other])) == ["a", "b"]
    assert (epochs(sender), broadcast.failures) == (1, 0)
