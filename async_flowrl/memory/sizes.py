"""Sizes of a model: numbers of parameters, and bytes in the dtype that a run computes in. It loads no model code."""

import re
from collections import Counter
from dataclasses import dataclass

from async_flowrl.config.schema import Config
from async_flowrl.policies.freeze import trained_names
from async_flowrl.policies.stored import StoredElements
from async_flowrl.policies.tuning import tuning_of

_BLOCK = re.compile(r"[^.]+\.\d+\.")
"""Beginning of the names of a block's tensors, e.g. `transformer_blocks.7.`."""
_BUFFER = ".pos_embed"
"""End of the name of the one kind of tensor in the files that is no parameter: diffusers' tables of positions."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, of which the adapter is what is trained: a LoRA, or with `full` the trained weights."""

    base_parameters: int
    """Parameters of the transformer without its LoRA."""
    blocks: int
    """Number of the transformer's blocks."""
    block_bytes: int
    """Bytes of the largest block of the base."""
    root_bytes: int
    """Bytes of the base that are in no block."""
    adapter_parameters: int
    """Trained parameters; from the headers of files, those of a LoRA count as 0."""
    text_parameters: int
    """Parameters of all text encoders."""
    vae_parameters: int
    buffer_bytes: int
    """Bytes of the transformer's buffers (constant tables), which are never sharded."""
    itemsize: int
    """Bytes of one number of the network and of a version."""
    full: bool

    @property
    def base_bytes(self) -> int:
        """Bytes of the base; its buffers are not among them."""
        return self.base_parameters * self.itemsize

    @property
    def version_bytes(self) -> int:
        """Bytes of one version as it is kept and sent; the trainer's own copy is float32."""
        return self.adapter_parameters * self.itemsize


def stored_sizes(config: Config, stored: StoredElements, itemsize: int) -> Sizes:
    """Returns the sizes by the headers of the model's files; buffers that are not saved are left out.

    `itemsize` is that of the dtype that the run computes in. Raises ValueError as `trained_names`.
    """
    blocks, full = Counter[str](), tuning_of(config).whole
    buffers = {name for name in stored.transformer if name.endswith(_BUFFER)}
    parameters = {name: elements for name, elements in stored.transformer.items() if name not in buffers}
    for name, elements in parameters.items():
        block = _BLOCK.match(name)
        blocks["" if block is None else block[0]] += elements
    root = blocks.pop("", 0)
    trained = trained_names(parameters, config.full.freeze) if full else []
    return Sizes(
        base_parameters=sum(parameters.values()),
        blocks=len(blocks),
        block_bytes=itemsize * max(blocks.values(), default=0),
        root_bytes=itemsize * root,
        adapter_parameters=sum(parameters[name] for name in trained),
        text_parameters=stored.text_encoders,
        vae_parameters=stored.vae,
        buffer_bytes=itemsize * sum(stored.transformer[name] for name in buffers),
        itemsize=itemsize,
        full=full,
    )
