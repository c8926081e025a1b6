"""The base of a process that samples and trains: read once, and held by the networks of both.

Two networks, because each has an adapter of its own: float32 masters with gradients in one, what is sampled with in
the other. So no value is ever swapped, and neither can compute with what is the other's. Their frozen parameters are
the same objects.
"""

from collections.abc import Container
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.base import Policy
from async_flowrl.policies.registry import ResolvedModel, load_policy
from checkpoint_engine import base_digest


class OneBase:
    """To be used by one thread at a time, as loading is (loading.ONE_AT_A_TIME)."""

    def __init__(self, model: ResolvedModel, *, parts: str, device: torch.device | str) -> None:
        """`parts` and `device` as `load_policy` has them."""
        self._model, self._parts, self._device = model, parts, device
        self._policy: Policy | None = None
        self._state: dict[str, Tensor] = {}
        self._digest = ""

    @property
    def policy(self) -> Policy:
        """The one that samples: read from the files the first time, without an adapter."""
        if self._policy is None:
            policy = load_policy(self._model, dtype=self._model.dtype, device=self._device, parts=self._parts)
            # Before any adapter is attached, which gives its layers' parameters other names.
            self._state = dict(cast("Any", policy.transformer).state_dict(keep_vars=True))
            self._digest = base_digest(dict(policy.transformer.named_parameters()))
            self._policy = policy
        return self._policy

    @property
    def digest(self) -> str:
        """Of the parameters, as they were read."""
        assert self.policy is not None
        return self._digest

    def lend(self, transformer: nn.Module, *, trained: Container[str] = ()) -> None:
        """Gives a network on the meta device, without adapter, the same parameters; copies of those that it trains.

        Raises RuntimeError where it is another network.
        """
        assert self.policy is not None
        own = {name: nn.Parameter(t.detach().clone()) for name, t in self._state.items() if name in trained}
        transformer.load_state_dict({**self._state, **own}, assign=True)
