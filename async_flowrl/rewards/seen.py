"""A record of the servers that a reward asks: which were slow, and which have answered at all."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

SLOW_SECONDS = 300.0
"""So long a server that let a request wait until its timeout is asked after the other ones, where there are any."""


def seen_by(reward: object) -> "Seen | None":
    """What a reward has seen, if it asks servers and keeps note of it, in its attribute `seen`."""
    seen = getattr(reward, "seen", None)
    return seen if isinstance(seen, Seen) else None


@dataclass
class Seen:
    """Of one reward in one worker; kept up to date by `post`."""

    _slow: dict[str, float] = field(default_factory=dict)
    """URL → until when it is asked last."""
    _answered: dict[str, bool] = field(default_factory=dict)

    def ordered(self, urls: Sequence[str]) -> list[str]:
        """The URLs as they are given, slow ones last."""
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._slow.get(url, now) > now)

    def stalled(self, url: str) -> None:
        """It gave no answer within the timeout of an attempt."""
        self._slow[url] = time.monotonic() + SLOW_SECONDS
        self._answered.setdefault(url, False)

    def answered(self, url: str) -> None:
        """It gave some answer, usable or not."""
        self._answered[url] = True

    def forget(self) -> None:
        """The servers are other ones from now on."""
        self._slow.clear()
        self._answered.clear()

    def take(self) -> dict[str, bool]:
        """URL → whether it has answered, of those that did or let an attempt time out since this was called last."""
        taken, self._answered = self._answered, {}
        return taken
