"""The model family FLUX.2-klein, which also edits: latents are [tokens, 128], positions have a fourth axis for text.

Tokens of edited images follow those of the noise, 10 apart on the first axis. Latents are normalised by statistics that
the VAE has for each channel of a token.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import flux, tiny, z_image
from async_flowrl.policies.pipeline import JOINT_ATTENTION, on_host, squares
from async_flowrl.types import Conditioning, EncoderInput, Sampling, TextWithImages

# Layers of the text encoder whose outputs stand side by side in an embedding: diffusers' default.
_TEXT_LAYERS = 9, 18, 27


class Flux2KleinPolicy(flux.FluxPolicy):
    """Policy of FLUX.2-klein; a base model has guidance, a distilled one has none."""

    family, title, stock_guidance = "flux2_klein", "FLUX.2-klein", "guidance_scale"
    images, apart = (0, math.inf), 10
    takes_negative, most_tokens = False, None
    # All linear layers of a block; those of the single-stream blocks are `to_qkv_mlp_proj` and `to_out`.
    lora_targets: Sequence[str] = (
        *JOINT_ATTENTION,
        *(f"{stream}.{layer}" for stream in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
        *("attn.to_qkv_mlp_proj", "attn.to_out"),
    )

    def encode(
        self, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
    ) -> list[Conditioning]:
        """Encodes one text at a time; every negative prompt is the empty text, as in the stock pipeline."""
        if negative:
            texts = [replace(text, text="") if isinstance(text, TextWithImages) else "" for text in texts]
        return super().encode(texts, system)

    def _encode_one(self, text: str) -> Conditioning:
        return on_host(prompt_embeds=self._stock_encode(text)[0])

    def _pixels(self, image: Any) -> Tensor:
        """At most 1024 × 1024 pixels; what is more than whole tokens is cut off at the edges."""
        processor = self.whole("encode images").image_processor
        image = processor._resize_if_exceeds_area(image)
        height, width = (side // self._side * self._side for side in (image.height, image.width))
        return cast("Tensor", processor.preprocess(image, height, width, resize_mode="crop"))

    def encode_image(self, image: Tensor) -> Tensor:
        tokens = squares(self._mode(image))
        mean, std = _mean_and_std(self.whole("encode images").vae, tokens)
        return (tokens - mean) / std

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self._text_tokens(512), self._config.joint_attention_dim), **self.image_shapes()}

    def _shift(self, tokens: int, steps: int) -> float:
        # diffusers' compute_empirical_mu: linear in the steps, between lines for 10 and for 200 steps.
        at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
        if tokens > 4300:
            return at_200
        slope = (at_200 - at_10) / 190.0
        return slope * steps + (at_200 - 200.0 * slope)

    def stock_latents(self, latents: Tensor, resolution: Resolution) -> Tensor:
        return latents.mT.reshape(len(latents), -1, *self._grid(resolution))

    def _unpacked(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        latents = latents.to(pipeline.vae.dtype)  # Before the statistics, as in the stock pipeline.
        mean, std = _mean_and_std(pipeline.vae, latents)
        return super()._unpacked(pipeline, latents * std + mean, resolution)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        return {cls.stock_guidance: sampling.true_cfg_scale}


def _mean_and_std(vae: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return vae.bn.running_mean.to(like), std.to(like)


class Flux2KleinFamily(flux.FluxFamily):
    policy = Flux2KleinPolicy
    pipeline, transformer = "Flux2KleinPipeline", "Flux2Transformer2DModel"
    tokenizer = "tokenizer"
    # The defaults of Flux2KleinPipeline.__call__, diffusers 0.42.
    usual_guidance = 4.0, 0.0
    usual_steps = 50
    # Flux2ImageProcessor.check_image_input.
    least_side, most_ratio = 64, 8.0

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        return z_image.in_chat(tokenizer, text, limit, thinking=False)


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a tiny FLUX.2-klein base model with `layers` blocks of each kind."""
    import diffusers
    from transformers import Qwen3ForCausalLM

    tokenizer = z_image.tiny_tokenizer()
    transformer = diffusers.Flux2Transformer2DModel(
        **tiny.blocks(config),
        num_single_layers=config.layers,
        joint_attention_dim=len(_TEXT_LAYERS) * tiny.TEXT_DIM,
        guidance_embeds=False,
        axes_dims_rope=(2, 4, 6, 4),
    )
    vae = tiny.image_vae(config.contrast, kind="AutoencoderKLFlux2", latent_channels=32)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        text_encoder=z_image.tiny_text_encoder(Qwen3ForCausalLM, tokenizer, max(_TEXT_LAYERS) + 1),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )
