"""A record of the servers that a reward asks: which timed out recently, and which have answered.

http_post.py writes it. The reward uses it to ask slow servers last, and the run to find servers that hang.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

SLOW_SECONDS = 300.0
"""Seconds for which a server that timed out is asked only after the others."""


def seen_by(reward: object) -> "Seen | None":
    """Returns the record in the reward's attribute `seen`; None if it has none."""
    seen = getattr(reward, "seen", None)
    return seen if isinstance(seen, Seen) else None


@dataclass
class Seen:
    """The record of one reward in one worker process."""

    _slow: dict[str, float] = field(default_factory=dict)
    """URL → `time.monotonic()` seconds until which it is asked last."""
    _answered: dict[str, bool] = field(default_factory=dict)
    """URL → True if it has answered since the last `take`, False if it has only timed out."""

    def ordered(self, urls: Sequence[str]) -> list[str]:
        """Returns the URLs in the given order, with those that timed out in the last SLOW_SECONDS moved to the end."""
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._slow.get(url, now) > now)

    def stalled(self, url: str) -> None:
        """Records that the server gave no answer within the timeout of one attempt."""
        self._slow[url] = time.monotonic() + SLOW_SECONDS
        self._answered.setdefault(url, False)

    def answered(self, url: str) -> None:
        """Records that the server gave an answer, whether it was usable or not."""
        self._answered[url] = True

    def forget(self) -> None:
        """Clears the record, because the servers have been replaced."""
        self._slow.clear()
        self._answered.clear()

    def take(self) -> dict[str, bool]:
        """Returns URL → whether it has answered, for the URLs recorded since the last call, and starts anew."""
        taken, self._answered = self._answered, {}
        return taken
