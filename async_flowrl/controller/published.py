"""Record of what a trainer rank has published of one stream, so that another rank can publish the same if it dies."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint_engine import Header


@dataclass
class Published:
    """The versions that a sender has, as its publisher retains them; see `Publisher` of checkpoint_engine."""

    retain: int
    """Newest sealed versions that are retained."""
    staged: set[int] = field(default_factory=set)
    """Versions without a digest yet."""
    sealed: dict[int, Header] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    """Versions that are retained until they are released."""

    @property
    def versions(self) -> list[int]:
        """All that a sender must have, oldest first."""
        return sorted(self.staged | self.sealed.keys())

    def sealed_one(self, header: Header) -> None:
        self.staged.discard(header.version)
        self.sealed[header.version] = header
        self._evict()

    def release(self, version: int) -> None:
        self.held.discard(version)
        self._evict()

    def moved(self, headers: Mapping[int, Header], before: str, now: str) -> list[int]:
        """Another rank has these. Returns the sealed versions that it lacks, which are forgotten here.

        Raises RuntimeError where a version has another digest than before, or one that was staged is lacking: its
        tickets wait for it.
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
