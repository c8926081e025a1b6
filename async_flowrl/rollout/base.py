"""What a rollout engine is: a plain object that turns requests into images and trajectories."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from async_flowrl.types import ByteArray, Conditioning, RolloutRequest, Span, Trajectory


@dataclass(frozen=True)
class Rollout:
    """images uint8 [n, H, W, 3]; no trajectory for evaluation requests."""

    images: ByteArray
    trajectory: Trajectory | None
    spans: tuple[Span, ...]


class RolloutEngine(Protocol):
    """Runs without Ray and without knowing about versions: whoever calls it has put the right weights in place."""

    def encode(self, texts: Sequence[str]) -> list[Conditioning]:
        """Embeddings of prompts, for the trainer (negative prompts, once per run)."""
        ...

    def generate(self, request: RolloutRequest) -> Rollout:
        """Denoises the request's images in fixed chunks and decodes them."""
        ...

    def lora_parameters(self) -> Mapping[str, Tensor]:
        """The live adapter tensors by layout name, for the receiver to turn into views of its flat buffer."""
        ...

    def lora_modules(self) -> Mapping[str, nn.Module]:
        """The live LoRA layers by module name, for the binding proof."""
        ...
