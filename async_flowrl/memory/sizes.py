"""Sizes of a model as the memory plan counts them, without the model: importing this module loads no model code."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.policies.freeze import trained_names
from async_flowrl.policies.stored import StoredElements

_BLOCK = re.compile(r"[^.]+\.\d+\.")
"""Beginning of the names of a block's tensors, e.g. `transformer_blocks.7.`."""
_BUFFER = ".pos_embed"
"""End of the name of the one kind of tensor in the files that is no parameter: diffusers' tables of positions."""


class _Counted(Protocol):
    """The sizes from which `Totals` follow."""

    @property
    def block_bytes(self) -> tuple[int, ...]: ...

    @property
    def root_bytes(self) -> int: ...

    @property
    def adapter_parameters(self) -> int: ...

    @property
    def itemsize(self) -> int: ...


class Sizes(_Counted, Protocol):
    """Sizes of a model; bytes are in the dtype that the run computes in. MetaModel has them, and StoredSizes."""

    @property
    def base_bytes(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    @property
    def version_bytes(self) -> int: ...

    @property
    def text_parameters(self) -> int: ...

    @property
    def vae_parameters(self) -> int: ...

    @property
    def full(self) -> bool: ...


class Totals:
    """The sizes of a model that are sums and products of its other sizes."""

    @property
    def base_bytes(self: _Counted) -> int:
        """Bytes of the base; its buffers are not among them."""
        return sum(self.block_bytes) + self.root_bytes

    @property
    def version_bytes(self: _Counted) -> int:
        """Bytes of one version as it is kept and sent; the trainer's own copy is float32."""
        return self.adapter_parameters * self.itemsize


@dataclass(frozen=True)
class StoredSizes(Totals):
    """Sizes of a model by the headers of its files. Buffers that are not saved are left out, and so is a LoRA."""

    block_elements: tuple[int, ...]
    root_elements: int
    adapter_parameters: int
    text_parameters: int
    vae_parameters: int
    itemsize: int
    """Bytes of one number of the network and of a version."""
    full: bool
    buffer_bytes: int = 0

    @classmethod
    def of(cls, config: Config, stored: StoredElements, itemsize: int) -> "StoredSizes":
        """`itemsize` is that of the dtype that the run computes in. Raises ValueError as `trained_names`."""
        blocks, full = Counter[str](), config.tune == FULL
        buffers = {name for name in stored.transformer if name.endswith(_BUFFER)}
        parameters = {name: elements for name, elements in stored.transformer.items() if name not in buffers}
        for name, elements in parameters.items():
            block = _BLOCK.match(name)
            blocks["" if block is None else block[0]] += elements
        root = blocks.pop("", 0)
        trained = trained_names(parameters, config.full.freeze) if full else []
        return cls(
            block_elements=tuple(blocks.values()) or (0,),
            root_elements=root,
            adapter_parameters=sum(parameters[name] for name in trained),
            text_parameters=stored.text_encoders,
            vae_parameters=stored.vae,
            itemsize=itemsize,
            full=full,
            buffer_bytes=itemsize * sum(stored.transformer[name] for name in buffers),
        )

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return tuple(elements * self.itemsize for elements in self.block_elements)

    @property
    def root_bytes(self) -> int:
        return self.root_elements * self.itemsize
