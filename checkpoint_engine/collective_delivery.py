"""CollectiveBroadcast is the controller's side of collective transports: it forms groups and broadcasts versions."""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from checkpoint_engine.base import Ack, Draft, ReceiverEndpoint, SenderEndpoint, leaders
from checkpoint_engine.errors import MemberBusy, TransferFailed, Verdict, error_names, verdict
from checkpoint_engine.process_group import MIN_BYTES_PER_SECOND, SENDER, Epoch

logger = logging.getLogger(__name__)

# After this many consecutive failures that no member's death explains, the collective transport is not used again.
MAX_FAILURES_IN_A_ROW = 3
SETUP_SECONDS_PER_MEMBER = 0.1  # Seconds per member that are added to the time limit of the set-up.
ABORT_AGAIN_SECONDS = 0.2  # Pause between two aborts of a group that is being formed.
MAX_MEMBERS = 64  # Largest number of receivers that are all in the group; if there are more, it has one of each node.
_VERIFIED = {"TransferCorrupted", "WeightsMismatch"}


class CollectiveBroadcast:
    """Broadcasts versions to groups of receivers. Deliveries may share one; its broadcasts run one after another."""

    def __init__(
        self,
        sender: SenderEndpoint,
        *,
        name: str = "gloo",
        setup_seconds: float = 60.0,
        ready_seconds: float = 10.0,
        sender_seconds: float = 30.0,
        max_members: int = MAX_MEMBERS,
    ) -> None:
        # A broadcast may take `ready_seconds` plus its bytes / MIN_BYTES_PER_SECOND. `sender_seconds` limits the wait
        # for a sender that is busy with something else. Beyond `max_members` receivers, the first of each node is in
        # the group.
        self.name = name
        self.failures = 0
        self._sender = sender
        self._setup_seconds, self._ready_seconds, self._sender_seconds = setup_seconds, ready_seconds, sender_seconds
        self._max_members = max_members
        self._secret = secrets.token_hex(16)
        self._number = 0
        self.members: tuple[ReceiverEndpoint, ...] = ()
        self._in_a_row = 0
        self._order = asyncio.Lock()

    async def __call__(
        self, version: int, receivers: Sequence[ReceiverEndpoint], busy: Sequence[ReceiverEndpoint] = ()
    ) -> dict[str, Ack | BaseException]:
        """Broadcasts a staged version, which is sealed meanwhile; returns an Ack or error for every member's name.

        The caller must send the version to all receivers without an Ack. Every wait has a limit, and errors of
        transports are returned, not raised. Raises MemberBusy, and broadcasts nothing, while a member is among the
        `busy` receivers, to which an earlier version or one to evaluate is being sent.
        """
        if self._is_off or not (receivers or busy):
            return {}
        async with self._order:
            members = self._who(receivers, busy)
            try:
                async with asyncio.timeout(self._sender_seconds):
                    draft = await self._sender.draft(version)
                await self._meet(members)
                results = await self._exchange(draft, members, await self._enter(draft, members))
            except Exception as error:  # any error: the caller delivers in another way
                await self._give_up(f"version {version} goes without {self.name}", members, [error])
                return {member.name: error for member in members}
            failures = [r for r in results.values() if isinstance(r, BaseException) and not error_names(r) & _VERIFIED]
            if failures:
                await self._give_up(f"version {version} goes without {self.name}", members, failures)
            else:
                self._in_a_row = 0
            return results

    async def regroup(self, receivers: Sequence[ReceiverEndpoint]) -> None:
        """Forms a new group, in the background, with the receivers that came after the present one was formed."""
        async with self._order:
            members = self._chosen(receivers)
            if self._is_off or not set(self.members) < set(members):
                return
            try:
                await self._meet(members)
            except Exception as error:  # any error: the next version forms a group again
                await self._give_up(f"{len(members)} receivers form no group of {self.name}", members, [error])

    async def close(self) -> None:
        await self._abort([])

    def has_leaders(self, receivers: int) -> bool:
        """Returns True if a group for `receivers` receivers has one member per node, which serves the others there."""
        return receivers > self._max_members

    @property
    def _is_off(self) -> bool:
        return self._in_a_row >= MAX_FAILURES_IN_A_ROW

    def _who(self, idle: Sequence[ReceiverEndpoint], busy: Sequence[ReceiverEndpoint]) -> tuple[ReceiverEndpoint, ...]:
        # The members: of the present group, or of a new one if one has left. MemberBusy if one of them, or every
        # receiver, is.
        stays = bool(self.members) and set(self.members) <= {*idle, *busy}
        late = [receiver for receiver in busy if not idle or (stays and receiver in self.members)]
        if late:
            raise MemberBusy(f"busy with an earlier delivery: {', '.join(receiver.name for receiver in late)}")
        return self.members if stays else tuple(self._chosen(idle))

    def _chosen(self, receivers: Sequence[ReceiverEndpoint]) -> list[ReceiverEndpoint]:
        if not self.has_leaders(len(receivers)):
            return list(receivers)
        here = [receiver for receiver in self.members if receiver in receivers]
        by_name = {receiver.name: receiver for receiver in [*here, *receivers]}
        return [by_name[name] for name in leaders({name: receiver.node for name, receiver in by_name.items()})]

    async def _meet(self, members: Sequence[ReceiverEndpoint]) -> None:
        if set(members) == set(self.members):
            return
        self.members = ()
        self._number += 1
        world = len(members) + 1
        seconds = self._setup_seconds + SETUP_SECONDS_PER_MEMBER * world
        async with asyncio.timeout(self._sender_seconds):
            host, port = await self._sender.address()
        epoch = Epoch(self.name, self._number, self._secret, host, port, world, self._ready_seconds, seconds)
        joins = [member.open_group(epoch, rank) for rank, member in enumerate(members, start=SENDER + 1)]
        loop = asyncio.get_running_loop()
        opening = [loop.create_task(call) for call in [self._sender.open_group(epoch, SENDER), *joins]]
        try:
            async with asyncio.timeout(seconds + 1.0):
                await asyncio.gather(*opening)
        except Exception:
            await self._turn_back(opening, members)
            raise
        finally:
            await _ended(opening)
        self.members = tuple(members)

    async def _turn_back(self, opening: "Sequence[asyncio.Task[None]]", members: Sequence[ReceiverEndpoint]) -> None:
        # Aborts the opening of an epoch, so that members do not wait for a missing one; again and again, because it may
        # arrive before the call that it must end.
        loop = asyncio.get_running_loop()
        limit = loop.time() + self._ready_seconds
        while (waiting := [task for task in opening if not task.done()]) and loop.time() < limit:
            await self._abort(members)
            await asyncio.wait(waiting, timeout=ABORT_AGAIN_SECONDS)

    async def _enter(self, draft: Draft, members: Sequence[ReceiverEndpoint]) -> "dict[str, asyncio.Task[Ack]]":
        # Returns member → task that receives the broadcast. It is started right after the question whether the member
        # is ready, which saves one round trip.
        loop, number = asyncio.get_running_loop(), self._number
        async with asyncio.timeout(self._sender_seconds):  # Its lane may have another stream's version to seal.
            await self._sender.ready(number, draft)
        questions = [loop.create_task(member.ready(number, draft)) for member in members]
        accepting = {member.name: loop.create_task(member.accept(draft)) for member in members}
        try:
            async with asyncio.timeout(self._ready_seconds):
                await asyncio.gather(*questions)
        except BaseException:  # the caller then aborts the group, which frees members that wait
            await _ended([*questions, *accepting.values()])
            raise
        return accepting

    async def _exchange(
        self, draft: Draft, members: Sequence[ReceiverEndpoint], accepting: "dict[str, asyncio.Task[Ack]]"
    ) -> dict[str, Ack | BaseException]:
        # The first failure of the transport aborts the others.
        loop = asyncio.get_running_loop()
        sending = loop.create_task(self._sender.send(draft))
        tasks: list[asyncio.Task[Any]] = [sending, *accepting.values()]
        limit = loop.time() + self._ready_seconds + draft.nbytes / MIN_BYTES_PER_SECOND + 1.0
        waiting = set(tasks)
        while waiting and loop.time() < limit:
            done, waiting = await asyncio.wait(
                waiting, timeout=limit - loop.time(), return_when=asyncio.FIRST_EXCEPTION
            )
            if _error_of_a_transfer(done - {sending}) or (sending in done and sending.exception()):
                break
        if waiting:
            await self._abort(members)
            _, waiting = await asyncio.wait(waiting, timeout=self._ready_seconds)
        await _ended(tasks)
        results = {name: _error(task) or task.result() for name, task in accepting.items()}
        error = _error(sending)
        served = all(isinstance(result, Ack) for result in results.values())
        if error is not None and (served or error_names(error) & _VERIFIED):
            raise error
        return results

    async def _give_up(self, what: str, members: Sequence[ReceiverEndpoint], errors: Sequence[BaseException]) -> None:
        # Failures that a member's death explains do not count against the transport.
        self.failures += 1
        self._in_a_row += not any(verdict(error) is Verdict.REPLACE for error in errors)
        self.members = ()
        await self._abort(members)
        after = f"; {self.name} is not tried again" if self._is_off else ""
        logger.warning("%s: %s%s", what, repr(errors[0]), after)

    async def _abort(self, members: Sequence[ReceiverEndpoint]) -> None:
        # Members that cannot be reached are only logged.
        calls = [self._sender.abort_group(), *(member.abort_group() for member in members)]
        limited = (asyncio.wait_for(call, self._ready_seconds) for call in calls)
        for error in await asyncio.gather(*limited, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.info("abort not delivered: %r", error)


async def _ended(tasks: "Sequence[asyncio.Task[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _error_of_a_transfer(done: "set[asyncio.Task[Any]]") -> bool:
    return any((error := task.exception()) and not error_names(error) & _VERIFIED for task in done)


def _error(task: "asyncio.Task[Any]") -> BaseException | None:
    return TransferFailed("no answer") if task.cancelled() else task.exception()
