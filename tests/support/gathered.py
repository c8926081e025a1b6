"""Ranks of a gather as threads of one process, over real gloo."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from checkpoint_engine import Layout
from checkpoint_engine.gather import Gather, GatheredVersions, shard_layout
from checkpoint_engine.process_group import Epoch, gloo_group

T = TypeVar("T")

SHAPES = {"blocks.0.weight": (7, 24), "blocks.0.norm": (3,), "blocks.1.weight": (7, 24), "proj": (1, 500)}
"""Two of one shape, and rows that two ranks cannot share evenly, or of which one has none."""
BUCKET = 700
"""Bytes: one of the larger tensors, or two smaller ones."""


def weights(version: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Rank:
    """One of the ranks, with the versions of one stream."""

    def __init__(
        self, store: Any, index: int, size: int, layout: Layout, seconds: float, options: Mapping[str, Any]
    ) -> None:
        self.group = gloo_group(store, index, Epoch("gloo", 0, "", "127.0.0.1", 1, size, seconds))
        self.gather = Gather(layout, self.group, **options)
        self.versions = GatheredVersions(self.gather, "policy")
        self._layout = shard_layout(layout, size, index, options.get("alignment", 256))
        self._index, self._size = index, size

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns this rank's rows as one vector."""
        data = self._layout.empty().zero_()
        for name, view in self._layout.views(data).items():
            rows = torch.chunk(tensors[name], self._size)
            if self._index < len(rows):
                view.copy_(rows[self._index])
        return data.view(next(iter(tensors.values())).dtype)


class Ranks:
    """`each(call)` makes a call of all ranks at once, each in its own thread, and returns their results."""

    def __init__(self, size: int, tensors: Mapping[str, Tensor], *, seconds: float = 60.0, **options: Any) -> None:
        self.threads, store = ThreadPoolExecutor(size), HashStore()
        options = {"bucket_bytes": BUCKET, **options}
        layout, indices = Layout.of(tensors), range(size)
        self.ranks = list(self.threads.map(lambda index: Rank(store, index, size, layout, seconds, options), indices))

    def each(self, call: Callable[[Rank], T]) -> list[T]:
        return list(self.threads.map(call, self.ranks))

    def gather(self, version: int, tensors: Mapping[str, Tensor]) -> Any:
        """Gathers a version; returns its header."""
        headers = self.each(lambda rank: rank.versions.gather(version, rank.gather.share(rank.flat(tensors))))
        assert headers[1:] == [None] * (len(self.ranks) - 1)
        return headers[0]
