"""TicketClock estimates when a process of `placement=shared` will have made the ticket that it is making.

The process makes its tickets one after the other, and it trains between two of them. The controller sees when tickets
are given and returned and when calls to train end. From these times it infers since when the present ticket has been
under way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAME_TURN_SECONDS = 0.001
"""A call to train that ends within so many seconds of a ticket's answer has been seen at the same time as that.

A long turn of the controller's event loop hides which of them ended first, and how long before.
"""


class TicketClock:
    """The calls for tickets of one process, each for a ticket or a batch of tickets; all times are in seconds."""

    def __init__(self) -> None:
        self._given = 0
        """Number of calls for tickets that are not answered; the process makes one of them, the others wait."""
        self._since = self._ended = 0.0
        """Times at which the present ticket probably began and at which the last one ended."""
        self._before: float | None = None
        """The value of `_since` before a call to train ended while it was to wait for the ticket; else None."""
        self._usual: float | None = None
        """Seconds that the last ticket took; None before the first one."""
        self._has_training = self._behind_ticket = False
        """Whether the process has training to do, and whether that waits for a ticket that was under way before."""

    @property
    def busy(self) -> bool:
        """True if the process has a ticket to make or training to do."""
        return self._given > 0 or self._has_training

    @contextmanager
    def ticket(self, clock: Callable[[], float]) -> Iterator[None]:
        """Context of a call for tickets. A call that fails does not count as a measurement, but ends its ticket."""
        if not self._given:
            self._since = clock()
        self._given += 1
        answered = False
        try:
            yield
            answered = True
        finally:
            self._given -= 1
            self._end(clock(), answered=answered)

    def _end(self, ended: float, *, answered: bool) -> None:
        """Measures the ticket that ended by `ended` if it was `answered`; the next one began when it ended.

        If a call to train that waited for the ticket was answered first, either the ticket's images came later than
        that answer, or the process trained before the ticket (the pause of shared/turns.py). It is the one that makes
        the ticket's time more like the last one's, as a ratio.
        """
        if answered:
            taken = ended - self._since
            if self._before is not None and (
                self._usual is None or (ended - self._before) * taken < self._usual * self._usual
            ):
                ended, taken = self._since, self._since - self._before
            self._usual = taken
        self._ended = self._since = ended
        self._before, self._behind_ticket = None, False

    def set_training(self, *, has_training: bool) -> None:
        """Records that the process has training to do from now on, or that it has none any more."""
        if has_training and not self._has_training:
            self._behind_ticket = self._given > 0
        self._has_training = has_training

    def trained(self, began: float, ended: float) -> float:
        """Returns the seconds of a call to train without its wait for a ticket; the next ticket begins at its end.

        They are 0.0 if nobody knows them, because the ticket's answer was seen only when the call's was.
        """
        if self._behind_ticket:
            self._before = self._since
        self._since, self._behind_ticket = ended, False
        seconds = ended - max(began, self._ended)
        return seconds if self._ended <= began or seconds > SAME_TURN_SECONDS else 0.0

    def left(self, now: float) -> float:
        """Returns the seconds that the present ticket will probably still take; 0.0 if there is none.

        Training that the process has to do comes after the present ticket and before the next one. A ticket that takes
        longer than the last one is expected to be late by as much again, and the first one to take twice the time that
        it has taken until now.
        """
        if not self._given or (self._has_training and not self._behind_ticket):
            return 0.0
        taken = now - self._since
        return taken if self._usual is None else abs(self._usual - taken)
