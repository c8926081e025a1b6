"""Published is the record of the versions of one stream that the sending trainer rank has.

A stream is one sequence of versions (the policy or the EMA). endpoints.py keeps the record; if the sending rank dies,
another rank publishes the same versions from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint_engine import Header


@dataclass
class Published:
    """The versions that a sender has, under the rules by which `Publisher` of checkpoint_engine retains them."""

    retain: int
    """Number of the newest sealed versions that are retained."""
    staged: set[int] = field(default_factory=set)
    """Versions that are copied aside and have no digest yet."""
    sealed: dict[int, Header] = field(default_factory=dict)
    """Version → header with its digest."""
    held: set[int] = field(default_factory=set)
    """Versions that are retained until they are released."""

    @property
    def versions(self) -> list[int]:
        """All versions that a sender must have, oldest first."""
        return sorted(self.staged | self.sealed.keys())

    def sealed_one(self, header: Header) -> None:
        """Records that a staged version is sealed, and forgets old versions."""
        self.staged.discard(header.version)
        self.sealed[header.version] = header
        self._evict()

    def release(self, version: int) -> None:
        """Records that a held version is no longer held, and forgets old versions."""
        self.held.discard(version)
        self._evict()

    def moved(self, headers: Mapping[int, Header], before: str, now: str) -> list[int]:
        """Records that another rank is the sender now and has the versions of `headers`; returns those that it lacks.

        They are forgotten. `before` and `now` are the names of the ranks. Raises RuntimeError if a version's digest
        differs from the earlier one, or if a staged version is lacking, because tickets wait for it.
        """
        for version, header in headers.items():
            if (known := self.sealed.get(version)) is not None and known.digest != header.digest:
                raise RuntimeError(
                    f"version {version} of stream {header.stream} has digest {header.digest} on {now}, and had "
                    f"{known.digest} on {before}"
                )
        if unsent := self.staged - headers.keys():
            raise RuntimeError(f"{before} died before it sent version {min(unsent)}, which {now} does not retain")
        lost = sorted(self.sealed.keys() - headers.keys())
        for version in lost:
            del self.sealed[version]
            self.held.discard(version)
        return lost

    def _evict(self) -> None:
        newest = sorted(self.sealed)[-self.retain :]
        for version in self.sealed.keys() - set(newest) - self.held:
            del self.sealed[version]
