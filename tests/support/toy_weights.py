"""Weights of toy runs (toy.py): those of one LoRA layer, and ToySender, which publishes them by real Publishers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from async_flowrl.seeds import generator
from async_flowrl.types import EMA, POLICY
from checkpoint_engine import PROOF_VERSION, LoraModule, Publisher, binding_probe, proof_tensors

SIZE = 8
LORA: Mapping[str, Any] = {"alpha": 4.0, "rank": 2}
"""What a LoRA's versions say of it; those of whole weights (tune=full) say nothing."""


def toy_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the tensors of one LoRA layer named "layer": A is random and B is zero, as at the start of a real run."""
    return {
        "layer.lora_A.weight": torch.randn(2, SIZE, generator=generator(seed)),
        "layer.lora_B.weight": torch.zeros(SIZE, 2),
    }


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def flattened(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def unflattened(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors of `flattened`."""
    like = toy_tensors()
    parts = zip(sorted(like), flat.split([like[name].numel() for name in sorted(like)]), strict=True)
    return {name: part.reshape(like[name].shape).clone() for name, part in parts}


def toy_lora(tensors: Mapping[str, torch.Tensor]) -> dict[str, LoraModule]:
    return {"layer": LoraModule(tensors["layer.lora_A.weight"], tensors["layer.lora_B.weight"], 2.0)}


class ToySender:
    """Publishes a toy trainer's weights, in place of `training.versions.PublishedStreams`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        retained: Mapping[int, Any],
        averages: Mapping[str, Any],
        live_versions: int,
        lora: Mapping[str, Any] = LORA,
    ) -> None:
        self.lora = lora
        publisher = partial(Publisher, tensors, retain=live_versions, **self.lora)
        self.policy, self.ema = publisher(POLICY), publisher(EMA)
        self.retained, self.averages = retained, averages
        self.kept: dict[tuple[str, int], Any] = {}
        """Stream and version → the weights, for versions that an evaluation may still ask for."""

    def weights(self, stream: str, version: int) -> Any:
        """Returns the weights of a version of a stream; None if it is neither among the last ones nor kept."""
        if (kept := self.kept.get((stream, version))) is not None:
            return kept
        if stream == EMA:
            return self.averages[EMA] if version == max(self.retained) else None
        return self.retained.get(version)

    def clear(self) -> None:
        self.policy.clear()
        self.ema.clear()

    def proof(self) -> dict[str, torch.Tensor]:
        tensors = proof_tensors(self.policy.layout, 1)
        self.policy.stage(PROOF_VERSION, tensors)
        return binding_probe(toy_lora(tensors))

    def proof_again(self) -> Any:
        again = Publisher(proof_tensors(self.policy.layout, 1), **self.lora)
        again.stage(PROOF_VERSION)
        again.seal(PROOF_VERSION)
        return again.payload(PROOF_VERSION)

    def stage(self, version: int, stream: str) -> None:
        getattr(self, stream).stage(version, self.weights(stream, version))

    def keep(self, stream: str, version: int) -> None:
        if (tensors := self.weights(stream, version)) is not None and (stream, version) not in self.kept:
            self.kept[stream, version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def release(self, stream: str, version: int) -> None:
        self.kept.pop((stream, version), None)
