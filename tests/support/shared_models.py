"""Tiny models that all tests of a session share: each is built at its first use, and no test may change it."""

from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.support.families import pipeline_of, policy_of
from tests.support.tiny import tiny_policy


class SharedModels:
    """Models in float32, without an adapter, for tests that only read them; `check` finds one that was changed.

    A test that adds a LoRA, casts, compiles, or puts another part into a model builds one of its own.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], Any] = {}
        self._digests: dict[tuple[str, str], dict[str, str]] = {}

    @cached_property
    def tiny(self) -> QwenImagePolicy:
        """The tiny Qwen-Image (`tiny_policy`)."""
        return self._built("policy", "tiny", tiny_policy)

    def policy(self, family: str) -> PipelinePolicy:
        """The policy of a family (`families.policy_of`)."""
        return self._built("policy", family, lambda: policy_of(family))

    def pipeline(self, family: str) -> Any:
        """diffusers' pipeline of a family (`families.pipeline_of`); its scheduler stays as the last call has set it."""
        return self._built("pipeline", family, lambda: pipeline_of(family))

    def _built(self, kind: str, name: str, build: Any) -> Any:
        key = kind, name
        if key not in self._models:
            self._models[key] = build()
            self._digests[key] = digests(self._models[key])
        return self._models[key]

    def check(self) -> None:
        """Raises AssertionError, which names model and tensors, if a model is not what it was when it was built."""
        for (kind, name), model in self._models.items():
            now, before = digests(model), self._digests[kind, name]
            changed = sorted(each for each in now.keys() | before.keys() if now.get(each) != before.get(each))
            assert not changed, f"a test has changed {', '.join(changed[:5])} of the shared {kind} of {name}"


def digests(model: Any) -> dict[str, str]:
    """Name of each parameter and buffer of a policy or pipeline → digest of its bytes, kind, and place in the graph."""
    return {
        f"{part}.{name}": _digest(tensor)
        for part, module in _modules(model)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    pipeline = model.whole("be compared") if hasattr(model, "whole") else model
    for part, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            yield part, module


def _digest(tensor: torch.Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.device} {tensor.requires_grad} {tensor.grad is None}"
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    return blake2b(data.numpy().tobytes() + kind.encode(), digest_size=16).hexdigest()
