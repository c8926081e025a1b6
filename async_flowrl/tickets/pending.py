"""Queues of the tickets that wait for a worker: one per kind and version, in the order of ordinals. Pure Python."""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping

from async_flowrl.tickets.ticket import EVALUATION, TRAIN, State, Ticket


class PendingTickets:
    """The PENDING tickets of a table.

    The table adds each ticket that becomes PENDING; one that becomes something else is dropped when it is first of its
    queue. So a queue may still contain tickets that were started, and a ticket that is made again may be in it twice.
    """

    def __init__(self, training: Mapping[int, Ticket], evaluation: Mapping[int, Ticket]) -> None:
        """Both mappings are the table's own, ordinal → ticket; what has left them is no longer PENDING."""
        self._tickets = {TRAIN: training, EVALUATION: evaluation}
        self._ordinals: dict[tuple[str, int], list[int]] = defaultdict(list)
        """(kind, version) → heap of ordinals."""

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._ordinals[ticket.kind, ticket.version], ticket.ordinal)

    def first(self, kind: str, versions: Iterable[int]) -> Ticket | None:
        """Returns the ticket with the lowest ordinal among those of one of these versions, or None."""
        tickets, first = self._tickets[kind], None
        for version in versions:
            heap = self._ordinals.get((kind, version), [])
            while heap and not (heap[0] in tickets and tickets[heap[0]].state is State.PENDING):
                heapq.heappop(heap)
            if heap and (first is None or heap[0] < first.ordinal):
                first = tickets[heap[0]]
        return first

    def any(self) -> bool:
        return any(self.first(kind, [version]) for kind, version in list(self._ordinals))

    def at_most(self, versions: Iterable[int]) -> int:
        """Returns an upper bound of `count`: a ticket started out of order counts until it is first of its queue."""
        return sum(len(self._ordinals.get((TRAIN, version), ())) for version in versions)

    def count(self, versions: Iterable[int]) -> int:
        """Returns the number of training tickets of these versions."""
        tickets = self._tickets[TRAIN]
        heaps = [self._ordinals.get((TRAIN, version), ()) for version in versions]
        ordinals = {ordinal for heap in heaps for ordinal in heap if ordinal in tickets}
        return sum(tickets[ordinal].state is State.PENDING for ordinal in ordinals)

    def forget(self, kind: str, *, before: int | None = None) -> None:
        """Removes the queues of a kind, those of versions lower than `before` if that is given."""
        for key in [key for key in self._ordinals if key[0] == kind and (before is None or key[1] < before)]:
            del self._ordinals[key]
