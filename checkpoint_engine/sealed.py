"""SealedVersions are the versions of one stream in a sending process's host memory, whose digests are known."""

import threading

from checkpoint_engine.base import Draft, Header
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.errors import VersionGone
from checkpoint_engine.host_buffers import HostBuffers
from checkpoint_engine.incremental import Sealing
from checkpoint_engine.layout import Layout


class SealedVersions:
    """Retains the newest `retain` sealed versions, for resends and new receivers, and those that `hold` names."""

    def __init__(
        self,
        layout: Layout,
        stream: str,
        *,
        alpha: float | None = None,
        rank: int | None = None,
        retain: int = 2,
        pinned: bool = False,
    ) -> None:
        """`alpha` and `rank` are those of LoRA tensors, as in Draft. `pinned` host memory is for copies from a GPU.

        Raises ValueError for retain < 1.
        """
        if retain < 1:
            raise ValueError(f"a publisher retains at least 1 version, got retain={retain}")
        self.layout, self.stream, self.alpha, self.rank, self.retain = layout, stream, alpha, rank, retain
        self._buffers = HostBuffers(layout, pinned=pinned)
        self._sealed: dict[int, tuple[Header, ByteArray]] = {}
        self._retained_longer: set[int] = set()
        self._changed = threading.Condition()

    def draft(self, version: int) -> Draft:
        """Returns the description of a version of this stream, without digests."""
        return Draft(self.stream, version, self.layout, self.alpha, self.rank)

    def begin(self, version: int) -> Sealing:
        """Returns a Sealing that has the header of a sealed version. Raises VersionGone if it is not retained."""
        header, data = self.payload(version)
        work = Sealing(header, data, None)
        work.header = header
        return work

    def payload(self, version: int) -> tuple[Header, ByteArray]:
        """Returns header and bytes uint8 [nbytes] of a retained version; the bytes must not be changed.

        Raises VersionGone if the version is not retained.
        """
        with self._changed:
            if version not in self._sealed:
                raise VersionGone(
                    f"version {version} of stream {self.stream} is not retained, only {sorted(self._sealed)} are"
                )
            return self._sealed[version]

    def retained(self) -> tuple[int, ...]:
        """Returns the sealed versions that can be sent, oldest first."""
        with self._changed:
            return tuple(sorted(self._sealed))

    def hold(self, version: int) -> None:
        """Retains a sealed version until `release`, regardless of newer ones. Raises VersionGone if it is dropped."""
        with self._changed:
            if version not in self._sealed:
                raise VersionGone(f"version {version} of stream {self.stream} is not retained and can't be held")
            self._retained_longer.add(version)

    def release(self, version: int) -> None:
        """Ends a `hold`; the version is dropped unless it is among the newest `retain`."""
        with self._changed:
            self._retained_longer.discard(version)
            self._evict()

    def clear(self) -> None:
        """Drops every version, so that a run can publish again from an earlier version."""
        with self._changed:
            self._sealed.clear()
            self._retained_longer.clear()
            self._changed.notify_all()

    def _end(self, work: Sealing, header: Header | None) -> None:
        """Retains a version whose sealing has ended; None means that it has failed."""
        if header is not None:
            with self._changed:
                self._sealed[header.version] = (header, work.data)
                self._evict()

    def _evict(self) -> None:
        """Drops versions that need not be retained; a payload that was returned before stays valid while it is used."""
        newest = sorted(self._sealed)[-self.retain :]
        for version in self._sealed.keys() - set(newest) - self._retained_longer:
            del self._sealed[version]
