"""The common part of policies on a diffusers pipeline: schedule, token grid, guidance, decoding.

A family's file adds what is its own: the latent layout, the network's arguments, how prompts are encoded.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import height_width, in_pixels, in_words, of_sides
from async_flowrl.policies.base import Shapes
from async_flowrl.policies.guidance import guided_velocity
from async_flowrl.policies.loading import TEXT_ENCODERS
from async_flowrl.types import Conditioning, Resolution, Sampling, TokenIds, Wording

JOINT_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
"""Projections of an attention over image and text, as diffusers names them: the image's, then the text's."""


class PipelinePolicy(ABC):
    """A policy on a diffusers pipeline; `pipeline` is None in trainer processes: no text encoder, no VAE."""

    family: ClassVar[str]
    title: ClassVar[str]
    """The model's name in messages."""
    lora_targets: Sequence[str]
    least_steps: ClassVar[int] = 1
    size_step: ClassVar[int] = 1
    """Pixels that the stock pipeline wants sides to be a multiple of, beside whole image tokens."""
    has_system_prompt: ClassVar[bool] = False
    stock_guidance: ClassVar[str] = "true_cfg_scale"
    """The stock pipeline's name of the scale of classifier-free guidance."""

    def __init__(
        self,
        transformer: nn.Module,
        scheduler: Any,
        *,
        side: int,
        dtype: torch.dtype,
        pipeline: Any | None = None,
        max_sequence_length: int | None = None,
    ) -> None:
        """`side`: pixels per image token and side (VAE factor times patch size).

        `max_sequence_length`: text tokens, as the pipeline's argument of that name; None = the pipeline's default.
        """
        self.transformer = transformer
        self._scheduler, self._side, self._dtype, self._pipeline = scheduler, side, dtype, pipeline
        self._config = cast("Any", transformer).config
        self._text_options = {} if max_sequence_length is None else {"max_sequence_length": max_sequence_length}
        self._schedules: dict[tuple[int, int], Tensor] = {}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(cast("nn.ModuleList", self.transformer.transformer_blocks))

    @property
    def lora_exclude(self) -> str | None:
        return None

    @property
    def embeds_guidance(self) -> bool:
        """Whether the network takes `guidance_scale` as an input (a guidance-distilled model)."""
        return False

    @property
    def text_encoders(self) -> Sequence[nn.Module]:
        """The pipeline's, in the order of their numbers; empty where it was not loaded."""
        found = [getattr(self._pipeline, name, None) for name in TEXT_ENCODERS]
        return [encoder for encoder in found if encoder is not None]

    @torch.no_grad()
    def encode(
        self, texts: Sequence[Wording], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Float32 arrays without batch dimension, by the names of the pipeline's own arguments, one dict per text.

        One text at a time: padding to a batch neighbour's length would change the last bits. Raises ValueError for a
        system prompt where the family's template has none, and for token ids where it takes only text.
        """
        self._whole("encode prompts")
        if system is not None and not self.has_system_prompt:
            raise ValueError(f"{self.title} has no system prompt, got {system!r}")
        encode = self._encode_negative if negative else self._encode_one
        return [encode(text) if isinstance(text, str) else self._encode_ids(text) for text in texts]

    @abstractmethod
    def _encode_one(self, text: str) -> Conditioning: ...

    def _encode_negative(self, text: str) -> Conditioning:
        """Of a prompt that guidance leads away from, where the pipeline words it otherwise."""
        return self._encode_one(text)

    def _encode_ids(self, ids: TokenIds) -> Conditioning:
        raise ValueError(f"{self.title} takes prompts as text, got {len(ids)} token ids")

    @abstractmethod
    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode` gives for a prompt of usual length; for plans, nothing is computed from it."""

    def _text_tokens(self, usual: int) -> int:
        """The longest text the encoder is asked for where it pads, otherwise `usual`."""
        return int(self._text_options.get("max_sequence_length", usual))

    def sigmas(self, num_inference_steps: int, resolution: Resolution) -> Tensor:
        """The pipeline's own schedule, float32 [T+1], exactly 1 first and exactly 0 last.

        Raises ValueError for fewer steps than the schedule is defined for.
        """
        if num_inference_steps < self.least_steps:
            least = f"num_inference_steps must be at least {self.least_steps} for {self.title}'s schedule"
            raise ValueError(f"{least}, got {num_inference_steps}")
        key = num_inference_steps, math.prod(self._grid(resolution))
        if key not in self._schedules:
            self._set_schedule(*key)
            sigmas = cast("Tensor", self._scheduler.sigmas).to("cpu", torch.float32).clone()
            if sigmas[0] != 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
                raise ValueError(f"the model's scheduler gives no schedule that falls from 1 to 0: {sigmas.tolist()}")
            self._schedules[key] = sigmas
        return self._schedules[key].clone()

    def _set_schedule(self, steps: int, tokens: int) -> None:
        """As most pipelines do: evenly spaced, then shifted by the number of image tokens."""
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import retrieve_timesteps

        sigmas = np.linspace(1.0, 1 / steps, steps)
        retrieve_timesteps(self._scheduler, steps, "cpu", sigmas=sigmas, mu=self._shift(tokens))

    def _shift(self, tokens: int) -> float:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

        config = self._scheduler.config
        return float(
            calculate_shift(
                tokens,
                config.get("base_image_seq_len", 256),
                config.get("max_image_seq_len", 4096),
                config.get("base_shift", 0.5),
                config.get("max_shift", 1.15),
            )
        )

    def _grid(self, resolution: Resolution) -> tuple[int, int]:
        """Rows and columns of image tokens. Raises ValueError, with the nearest size, where they are not whole."""
        (height, width), step = height_width(resolution), math.lcm(self._side, self.size_step)
        if height % step or width % step:
            wanted = "a multiple" if isinstance(resolution, int) else "multiples"
            nearest = of_sides(*(step * max(1, round(each / step)) for each in (height, width)))
            raise ValueError(
                f"resolution must be {wanted} of {step}, got {in_words(resolution)}, nearest: {in_words(nearest)}"
            )
        return height // self._side, width // self._side

    @abstractmethod
    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
        """Shape of one image's latents, without the batch dimension."""

    def shapes(self, resolution: Resolution) -> Shapes:
        """Of an image's latents and of a prompt of usual length."""
        return Shapes(self.latent_shape(resolution), self.conditioning_shapes())

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        sampling: Sampling,
    ) -> Tensor:
        """Guided velocity [n, ...] float32 of `latents` [n, ...] at noise level `sigma` [n] float32.

        True CFG has two branches, with gradients through both: in one batch, or in two where `_apart`.
        """
        if tuple(latents.shape[1:]) != self.latent_shape(sampling.resolution):
            raise ValueError(f"latents {tuple(latents.shape)} are not those of {in_pixels(sampling.resolution)} images")
        self.check(sampling)
        if sampling.true_cfg_scale <= 1:
            return self._network(latents, sigma, [positive], sampling)
        if negative is None:
            raise ValueError(f"true_cfg_scale {sampling.true_cfg_scale} needs the negative prompt's conditioning")
        if _apart(positive, negative, latents.device):
            conditional = self._network(latents, sigma, [positive], sampling)
            unconditional = self._network(latents, sigma, [negative], sampling)
        else:
            rows = torch.cat([latents, latents]), torch.cat([sigma, sigma])
            conditional, unconditional = self._network(*rows, [positive, negative], sampling).chunk(2)
        return self._guide(conditional, unconditional, sampling.true_cfg_scale)

    def check(self, sampling: Sampling) -> None:
        """Raises ValueError where embedded guidance is asked for and the network takes none, or the other way round,
        and for a true_cfg_scale that would weaken the prompt."""
        if 0 < sampling.true_cfg_scale < 1:
            raise ValueError(
                f"rollout.true_cfg_scale must be above 1, or 0 or 1 for no guidance, got {sampling.true_cfg_scale}"
            )
        if sampling.guidance_scale > 0 and not self.embeds_guidance:
            raise ValueError(
                f"rollout.guidance_scale must be 0 for {self.title}, got {sampling.guidance_scale}; use true_cfg_scale"
            )
        if sampling.guidance_scale <= 0 and self.embeds_guidance:
            raise ValueError(
                f"rollout.guidance_scale must be above 0 for {self.title}, which takes it as an input, "
                f"got {sampling.guidance_scale}"
            )

    def _guide(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        return guided_velocity(conditional, unconditional, scale)

    @abstractmethod
    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        """The network's velocity, float32, for rows that belong in equal parts to `branches`, in their order.

        Only the network's input is cast to its dtype.
        """

    def _rows(self, branches: Sequence[Mapping[str, Tensor]], name: str, rows: int) -> Tensor:
        """One conditioning tensor repeated for `rows` rows in all, in the network's dtype [rows, ...]."""
        each = rows // len(branches)
        tensors = [branch[name].to(self._dtype) for branch in branches]
        return torch.cat([tensor.expand(each, *tensor.shape) for tensor in tensors])

    @torch.no_grad()
    def decode(self, latents: Tensor, resolution: Resolution) -> Tensor:
        """Images uint8 [n, H, W, 3] of final latents, on their device, rounded as diffusers' image processor does."""
        pipeline = self._whole("decode images")
        images = pipeline.image_processor.postprocess(self._decoded(pipeline, latents, resolution), output_type="pt")
        return cast("Tensor", (images.permute(0, 2, 3, 1).float() * 255).round().to(torch.uint8))

    def decode_by_parts(self, *, images: bool, tiles: bool) -> None:
        """Lets the VAE decode one image at a time, and images by overlapping tiles, whose blended seams other pixels
        have. Which images are large enough for tiles is the VAE's to say.

        Raises ValueError where the VAE cannot.
        """
        vae = self._whole("decode images").vae
        for wanted, key, name in ((images, "vae_slicing", "enable_slicing"), (tiles, "vae_tiling", "enable_tiling")):
            if not wanted:
                continue
            if not hasattr(vae, name):
                raise ValueError(f"rollout.{key}=true: {self.title}'s {type(vae).__name__} has no {name}")
            getattr(vae, name)()

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        """Images [n, 3, H, W] as the VAE gives them."""
        vae = pipeline.vae
        scaled = self._unpacked(pipeline, latents, resolution).to(vae.dtype) / vae.config.scaling_factor
        return cast("Tensor", vae.decode(scaled + vae.config.shift_factor, return_dict=False)[0])

    def _unpacked(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        """Latents as the VAE takes them, [n, C, h, w]."""
        return latents

    def _whole(self, purpose: str) -> Any:
        if self._pipeline is None:
            raise RuntimeError(f"this process loaded only the transformer and cannot {purpose}")
        return self._pipeline

    @classmethod
    def pixels_per_token(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> int:
        """Side of an image token, from the configurations of the VAE and the transformer.

        By default two by two latents of an `AutoencoderKL`, each stage of which but the last halves the image's side.
        """
        stages = len(vae["block_out_channels"])
        return int(2**stages)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        """The stock pipeline's arguments for the guidance of `sampling`."""
        return {
            cls.stock_guidance: sampling.true_cfg_scale,
            "negative_prompt": sampling.negative_prompt if sampling.true_cfg_scale > 1 else None,
        }


def _apart(positive: Mapping[str, Tensor], negative: Mapping[str, Tensor], device: torch.device) -> bool:
    """Whether the branches of guidance go through the network one after the other: on CUDA, for texts of other lengths.

    In one batch the shorter text is padded and masked, and with a mask there is no flash attention; text positions do
    not depend on padding, so the mathematics is the same. A CPU has no such kernel to win.
    """
    return device.type == "cuda" and any(positive[name].shape != negative[name].shape for name in positive)
