"""Bytes that tensor operations make, also on the meta device."""

from torch import Tensor

from async_flowrl.memory.rehearsal.phases import Ledger


class Allocations(Ledger):  # type: ignore[no-untyped-call]
    """Context that counts all storages that are made in it: `live` now, `peak` so far."""

    def counts(self, tensor: Tensor) -> bool:
        return True
