"""The interface of a model family, for the rollout engine and the trainer; one file per family implements it.

A `PolicyFamily` loads a model, a `Policy` is the loaded model. `PipelineFamily` and `PipelinePolicy` implement most of
it for a model that diffusers has a pipeline of.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution
from async_flowrl.types import Conditioning, EncoderInput, Prompt, Sampling

# diffusers' names of the linear layers in an attention over image and text: four for the image, four for the text.
_IMAGE_ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
JOINT_ATTENTION = (*_IMAGE_ATTENTION, "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out")


class Shapes(NamedTuple):
    """Shapes of float32 arrays in a rollout, without batch dimension: latents, and conditioning by name."""

    latents: tuple[int, ...]
    conditioning: Mapping[str, tuple[int, ...]]


class Policy(ABC):
    """A flow-matching network with schedule, guidance, text encoders and VAE. Latents are [n, ...] in any layout.

    `family` is its family's name in the registry. `transformer` is the only module that is trained; a LoRA is attached
    to it as PEFT adapter `default`, to the linear layers whose names end in one of `lora_targets` (the default of
    `lora.targets`).
    """

    family: ClassVar[str]
    transformer: nn.Module
    lora_targets: Sequence[str]

    @property
    def lora_exclude(self) -> str | None:
        """Regular expression for the full names of layers that cannot change the output, and so get no LoRA."""
        return None

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer's blocks in forward order: units of FSDP, torch.compile and gradient checkpointing."""

    def stock_latents(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns initial latents in the shape in which the stock pipeline takes them as its argument `latents`."""
        return latents

    @property
    def experts(self) -> Sequence[str]:
        """Names of the parts of the transformer, all alike, of which a noise level uses one; () if it uses all of it.

        A part that no row of an optimizer step used is left as it is by this step.
        """
        return ()

    @property
    @abstractmethod
    def text_encoders(self) -> Sequence[nn.Module]:
        """The modules that only `encode` uses; `encode` runs on their device. Empty if they are not loaded."""

    @abstractmethod
    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Returns the conditioning of each text: float32 arrays without batch dimension, named as in the pipeline.

        `negative=True` encodes a negative prompt, for which some pipelines use another template. `system` replaces the
        system prompt of the family's template. Raises ValueError for a system prompt or token ids if the family does
        not support them, and RuntimeError in a process without text encoders.
        """

    @abstractmethod
    def check(self, sampling: Sampling) -> None:
        """Raises ValueError, one sentence, for guidance settings that the network does not support."""

    @abstractmethod
    def sigmas(self, num_inference_steps: int, resolution: Resolution) -> Tensor:
        """Returns the noise levels of the schedule, float32 [T+1] on the CPU, from exactly 1 down to exactly 0."""

    @abstractmethod
    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
        """Returns the shape of one image's latents, without batch dimension."""

    @abstractmethod
    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        sampling: Sampling,
    ) -> Tensor:
        """Returns the velocity eps - x0 with guidance, float32 [n, ...]. Rollout and training call the same function.

        `latents` is [n, ...] and `sigma` their noise levels, float32 [n], which may differ per row. `positive` and
        `negative` hold the conditioning of one prompt, without batch dimension, for all n rows.
        """

    @abstractmethod
    def decode(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns images uint8 [n, H, W, 3] of final latents, on their device; RuntimeError without a loaded VAE.

        With a size that has frames they are videos, [n, frames, H, W, 3].
        """

    def pixels(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Returns the images of final latents before rounding, float32 [n, 3, H, W] in 0 .. 1, with their gradient."""
        raise NotImplementedError


class PolicyFamily(ABC):
    """A model family: loads its models and answers questions about them. It is constructed without arguments.

    `usual_guidance` (true_cfg_scale, guidance_scale) and `usual_steps` are those with which its models are sampled.
    """

    usual_guidance: tuple[float, float]
    usual_steps: int

    @abstractmethod
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
        """Loads the model at `path` (a local folder, or a hub name at `revision`) in `dtype` on `device`.

        `parts` says what is loaded: "all" (transformer, text encoders, VAE), "offload" (all, text encoders in host
        memory), "cached" (all but the text encoders), "text" (only text encoders; the transformer has no weights),
        "vae" (only the VAE; the same), "transformer", or "structure" (the transformer on the meta device, whose weights
        the FSDP ranks fill in later). Rollout workers use the first four, the trainer the last three.
        `max_sequence_length` is the longest prompt in tokens; None means the default of the diffusers pipeline.
        """

    def around(self, pipeline: Any, dtype: torch.dtype, *, max_sequence_length: int | None = None) -> Policy:
        """Returns the policy of a loaded diffusers pipeline, for tools that also sample with that pipeline."""
        raise NotImplementedError

    @abstractmethod
    def shapes(
        self, path: str, resolution: Resolution, *, revision: str | None = None, max_sequence_length: int | None = None
    ) -> Shapes:
        """Returns shapes from the model's configuration files; the controller asks at start-up and loads no model.

        Raises ValueError for a resolution that the model does not support.
        """

    @abstractmethod
    def check_prompts(self, prompts: Sequence[Prompt], path: str, *, revision: str | None = None) -> None:
        """Raises ValueError, one sentence, for a system prompt or token ids that the model cannot encode.

        It is called at start-up with the prompts that have one of them, and loads no weights.
        """

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        """Returns the guidance of `sampling` as keyword arguments of the diffusers pipeline's `__call__`."""
        raise NotImplementedError
