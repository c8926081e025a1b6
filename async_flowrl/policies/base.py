"""The interface of a model family for the rollout engine and the trainer. One file per family implements it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from async_flowrl.types import Conditioning, Prompt, Resolution, Sampling, Wording


@dataclass(frozen=True)
class Shapes:
    """Shapes of float32 arrays in a rollout: an image's latents at one point, and a prompt's conditioning."""

    latents: tuple[int, ...]
    conditioning: Mapping[str, tuple[int, ...]]


class Policy(Protocol):
    """A flow-matching network with the maths around it. Latents keep the family's own layout [n, ...]."""

    @property
    def family(self) -> str:
        """Its name in the registry."""
        ...

    transformer: nn.Module
    """The only module that is trained; it carries the LoRA adapter named `default`."""
    lora_targets: Sequence[str]
    """Suffixes of the linear layers that are adapted where `lora.targets` is not set."""

    @property
    def lora_exclude(self) -> str | None:
        """Regular expression of modules that get no gradient (dead branches)."""
        ...

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The units of FSDP, torch.compile and gradient checkpointing, in forward order."""
        ...

    @property
    def text_encoders(self) -> Sequence[nn.Module]:
        """The modules that `encode` computes with and nothing else does; `encode` runs on the device they are on."""
        ...

    def encode(
        self, texts: Sequence[Wording], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Prompt embeddings, one dict per text; only in processes that loaded the text encoder.

        `negative`: as what guidance leads away from, which some pipelines word otherwise.

        Names are those of the stock pipeline's arguments, arrays have no batch dimension. `system` replaces the system
        prompt of the family's template; ValueError where there is none, and for token ids where it takes only text.
        """
        ...

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError, one sentence, for guidance that the network cannot be asked for. Called at start-up."""
        ...

    def sigmas(self, num_inference_steps: int, resolution: Resolution) -> Tensor:
        """The schedule, float32 [T+1], from exactly 1 down to exactly 0."""
        ...

    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
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

    def decode(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Images uint8 [n, H, W, 3] on the latents' device; only in processes that loaded the VAE."""
        ...


class PolicyFamily(Protocol):
    """Loads models of a family, with text encoder and VAE only where images are made. Built without arguments."""

    usual_guidance: tuple[float, float]
    """(true_cfg_scale, guidance_scale) that its models are usually sampled with."""
    usual_steps: int
    """Denoising steps that its models are usually sampled with: the default of diffusers' pipeline."""

    def load(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parts: str,
        revision: str | None = None,
        max_sequence_length: int | None = None,
    ) -> Policy:
        """`parts` is "all", "offload" or "cached" (rollout), "text" (for "cached", while prompts are encoded),
        "transformer" (a lone trainer) or "structure" (a rank among others).

        "offload" is "all" with the text encoders in host memory, so that `device` need not have room for them; "cached"
        is "all" without text encoders, "text" is the text encoders for `encode` alone, the transformer without weights;
        "structure" is the transformer with its parameters on the meta device; they are filled shard by shard.
        """
        ...

    def around(self, pipeline: Any, dtype: torch.dtype, *, max_sequence_length: int | None = None) -> Policy:
        """The policy of a diffusers pipeline that is loaded already, for tools that sample with the stock pipeline."""
        ...

    def shapes(
        self, path: str, resolution: Resolution, *, revision: str | None = None, max_sequence_length: int | None = None
    ) -> Shapes:
        """Shapes from the model's configuration files alone: asked at start-up, in a process without models.

        The prompt is one of usual length. Raises ValueError for a resolution that the model has no latents for.
        """
        ...

    def check_prompts(self, prompts: Sequence[Prompt], path: str, *, revision: str | None = None) -> None:
        """Raises ValueError, one sentence, for a system prompt or token ids that the model cannot encode.

        Called at start-up where a prompt has either; no weights are loaded for it.
        """
        ...

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """The stock pipeline's arguments for the guidance of `sampling`."""
        ...
