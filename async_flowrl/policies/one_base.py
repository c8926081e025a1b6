"""The base weights of a process that samples and trains (`placement=shared`): read once, used by both of its networks.

Each network has its own adapter, and the frozen parameters of both are the same objects: no value is ever swapped, and
neither network can compute with the other's adapter.
"""

from collections.abc import Container
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel, load_policy
from checkpoint_engine import base_digest


class OneBase:
    """The base weights of one process. Only one thread may use it at a time, as for all loading (`ONE_AT_A_TIME`)."""

    def __init__(self, model: ResolvedModel, *, parts: str, device: torch.device | str) -> None:
        self._model, self._parts, self._device = model, parts, device

    @property
    def is_read(self) -> bool:
        return "_read" in vars(self)

    @property
    def policy(self) -> PipelinePolicy:
        """The policy that samples. It is read from the files on the first access and then has no adapter."""
        return self._read[0]

    @property
    def digest(self) -> str:
        """Digest of the parameters as they were read."""
        return self._read[2]

    @cached_property
    def _read(self) -> tuple[PipelinePolicy, dict[str, Tensor], str]:
        # Taken before an adapter is attached, because that changes the names of the adapted layers' parameters.
        policy = load_policy(self._model, dtype=self._model.dtype, device=self._device, parts=self._parts)
        state = dict(cast("Any", policy.transformer).state_dict(keep_vars=True))
        return policy, state, base_digest(dict(policy.transformer.named_parameters()))

    def share_parameters(self, transformer: nn.Module, *, trained: Container[str] = ()) -> None:
        """Puts the base's parameters into a network on the meta device, and copies of those in `trained`."""
        _, state, _ = self._read
        copies = {name: nn.Parameter(t.detach().clone()) for name, t in state.items() if name in trained}
        transformer.load_state_dict({**state, **copies}, assign=True)
