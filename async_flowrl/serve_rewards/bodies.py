"""The bytes that all requests of a server hold together: bounded, whoever sends how many at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class Full(Exception):
    """There is no room for as many bytes now."""


@dataclass
class Share:
    """What one request holds."""

    room: "Room"
    taken: int = 0

    def grow(self, size: int) -> None:
        """Makes it `size` bytes, if it has fewer. Raises Full."""
        more = size - self.taken
        if more <= 0:
            return
        if self.room.taken + more > self.room.size:
            raise Full
        self.room.taken += more
        self.taken = size


@dataclass
class Room:
    """`size` bytes for the bodies of all requests, from their first byte to their reply."""

    size: int
    taken: int = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Of one request; given back when the body of this ends."""
        share = Share(self)
        try:
            yield share
        finally:
            self.taken -= share.taken
