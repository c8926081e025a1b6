"""The memory limit of a reward server: the number of body bytes that all its requests together may hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Full(Exception):
    """Raised if a request needs more bytes than are free now."""


@dataclass
class Share:
    """The bytes that one request has reserved."""

    room: "Room"
    taken: int = 0

    def grow(self, size: int) -> None:
        """Reserves memory up to `size` bytes in total for this request; a smaller size changes nothing. Raises Full."""
        more = size - self.taken
        if more <= 0:
            return
        if self.room.taken + more > self.room.size:
            raise Full
        self.room.taken += more
        self.taken = size


@dataclass
class Room:
    """A budget of `size` bytes for the bodies of all requests, each from its first byte until its reply."""

    size: int
    taken: int = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Yields the share of one request; its bytes are returned when the `with` block ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self.taken -= share.taken
