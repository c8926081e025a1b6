"""What a model family gives the rollout engine and the trainer. One file per family implements it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from async_flowrl.types import ByteArray, Conditioning, Sampling


class Policy(Protocol):
    """A flow-matching network with the maths around it. Latents keep the family's own layout [n, ...]."""

    family: str
    transformer: nn.Module
    """The only module that is trained; it carries the LoRA adapter named `default`."""
    lora_targets: Sequence[str]
    lora_exclude: str | None
    """Regular expression of modules that get no gradient (dead branches)."""
    blocks: Sequence[nn.Module]
    """What FSDP shards and gradient checkpointing wraps, in forward order."""

    def encode(self, texts: Sequence[str], system: str | None = None) -> list[Conditioning]:
        """Prompt embeddings, one per text; only in processes that loaded the text encoder.

        `system` replaces the system prompt of the family's template.
        """
        ...

    def sigmas(self, num_inference_steps: int, resolution: int) -> Tensor:
        """The schedule, float32 [T+1], from exactly 1 down to exactly 0."""
        ...

    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        """Shape of one image's latents, without the batch dimension."""
        ...

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        sampling: Sampling,
    ) -> Tensor:
        """Guided velocity eps - x0, float32 [n, ...]. The same function in rollout and training.

        `sigma` is float32 [n] (it may differ per sample); `positive` and `negative` hold one prompt's conditioning
        with no batch dimension (all n latents are of that prompt); guidance follows `sampling`.
        """
        ...

    def decode(self, latents: Tensor, resolution: int) -> ByteArray:
        """Images uint8 [n, H, W, 3]; only in processes that loaded the VAE."""
        ...


class PolicyFamily(Protocol):
    """How a family is loaded: text encoder and VAE only where images are made."""

    def load(
        self, path: str, *, dtype: torch.dtype, device: torch.device, parts: str, revision: str | None = None
    ) -> Policy:
        """`parts` is "all" (rollout) or "transformer" (trainer)."""
        ...
