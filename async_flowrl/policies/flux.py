"""The model family FLUX.1: latents are [tokens, 64], and FLUX.1-dev takes the guidance scale as a network input.

Families that edit build on it: the tokens of the edited images follow those of the noise, and have positions apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import IMAGE, JOINT_ATTENTION, PipelinePolicy, from_squares, on_host, squares
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Prompt, Sampling

_MLP = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


class FluxPolicy(PipelinePolicy):
    """Policy of FLUX.1-dev (guidance scale as network input) and FLUX.1-schnell; both also allow true CFG."""

    family = "flux"
    title = "FLUX.1"
    packs_tokens = pads_texts = True
    most_tokens: ClassVar[int | None] = 512
    # As in flow_grpo's FLUX scripts. `attn.to_q`, `to_k` and `to_v` also exist in the single-stream blocks.
    lora_targets: Sequence[str] = (*JOINT_ATTENTION, *_MLP)
    # First coordinate of the first edited image, and distance to that of the next; the noise is at 0.
    apart: ClassVar[int] = 1

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return [*super().blocks, *cast("nn.ModuleList", self.transformer.single_transformer_blocks)]

    @property
    def lora_exclude(self) -> str | None:
        """The text layers of the last double-stream block: without single-stream blocks nothing uses their output."""
        if self._config.num_single_layers:
            return None
        last = self._config.num_layers - 1
        return rf"transformer_blocks\.{last}\.(attn\.to_add_out|attn\.add_q_proj|ff_context\..*)"

    @property
    def embeds_guidance(self) -> bool:
        return bool(getattr(self._config, "guidance_embeds", False))

    def _encode_one(self, text: str) -> Conditioning:
        embeds, pooled, _ = self._stock_encode(text)
        return on_host(prompt_embeds=embeds, pooled_prompt_embeds=pooled)

    def _encode_with_images(self, text: str, images: Sequence[Any]) -> Conditioning:
        """Returns what a text alone gives, and {"image_0": [rows, columns, channels], …}."""
        edited = {IMAGE.format(place): self.encode_image(self._pixels(image)) for place, image in enumerate(images)}
        return {**self._encode_one(text), **on_host(**edited)}

    def _pixels(self, image: Any) -> Tensor:
        """Returns a Pillow image at the size of the stock pipeline, [1, 3, H, W] from -1 to 1."""
        raise NotImplementedError  # Only families that edit have it.

    def encode_image(self, image: Tensor) -> Tensor:
        config = self.whole("encode images").vae.config
        return squares((self._mode(image) - config.shift_factor) * config.scaling_factor)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "prompt_embeds": (self._text_tokens(512), self._config.joint_attention_dim),
            "pooled_prompt_embeds": (self._config.pooled_projection_dim,),
            **self.image_shapes(),
        }

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        embeds, images = self._rows(branches, "prompt_embeds", len(latents)), self._edited(branches, len(latents))
        guidance = torch.full_like(sigma, sampling.guidance_scale) if self.embeds_guidance else None
        grids = [self._grid(sampling.resolution), *(image.shape[1:3] for image in images)]
        places = [self._positions(place, rows, columns, 1, embeds) for place, (rows, columns) in enumerate(grids)]
        pooled = {}
        if "pooled_prompt_embeds" in branches[0]:
            pooled["pooled_projections"] = self._rows(branches, "pooled_prompt_embeds", len(latents))
        return self._called(
            hidden_states=torch.cat([latents.to(self._dtype), *(image.flatten(1, 2) for image in images)], dim=1),
            timestep=self._time(sigma),
            guidance=guidance,
            encoder_hidden_states=embeds,
            txt_ids=self._positions(0, 1, 1, embeds.shape[1], embeds),
            img_ids=torch.cat(places),
            **pooled,
        )[:, : latents.shape[1]]

    def _positions(self, place: int, rows: int, columns: int, tokens: int, like: Tensor) -> Tensor:
        """Returns coordinates [rows · columns · tokens, axes]; only FLUX.2 has a fourth axis, for tokens of text."""
        sides = (torch.arange(side, device=like.device) for side in (rows, columns, tokens))
        first = torch.full((1,), self.apart * place, device=like.device)
        return torch.cartesian_prod(first, *sides)[:, : len(self._config.axes_dims_rope)]

    def _unpacked(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        return from_squares(latents, self._grid(resolution))

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        return {**super().guidance_arguments(sampling), "guidance_scale": sampling.guidance_scale}


class FluxFamily(PipelineFamily):
    policy = FluxPolicy
    pipeline, transformer = "FluxPipeline", "FluxTransformer2DModel"
    tokenizer = "tokenizer_2"
    layer_keys = ("num_layers", "num_single_layers")
    # The defaults of FluxPipeline.__call__, diffusers 0.40.
    usual_guidance = 1.0, 3.5
    usual_steps = 28
    # Of an image to edit, in the stock pipelines: least side in pixels, which is a token's at least; most times the
    # shorter side in the longer.
    least_side: ClassVar[int] = 0
    most_ratio: ClassVar[float] = math.inf

    def check_length(self, prompt: Prompt, tokenizer: Any | None, side: int) -> None:
        least = max(self.least_side, side)
        ratio = "" if math.isinf(self.most_ratio) else f", one at most {self.most_ratio:g} times the other"
        for short, long in (sorted(image.size) for image in prompt.images):
            if short < least or long > self.most_ratio * short:
                raise ValueError(
                    f"{self.policy.title} edits images with sides of {least} px at least{ratio}, got {short} × {long}"
                )


def tiny_pipeline(config: TinyConfig, stock: str = "FluxPipeline", **vae: Any) -> Any:
    """Returns a tiny FLUX.1-dev with `layers` blocks of each kind; the global CPU generator draws its weights.

    `stock` is the class of the pipeline, `vae` are options of `tiny.image_vae`.
    """
    import diffusers
    from transformers import CLIPTextModel

    clip, t5 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    transformer = diffusers.FluxTransformer2DModel(
        **tiny.blocks(config),
        num_single_layers=config.layers,
        joint_attention_dim=tiny.T5_DIM,
        pooled_projection_dim=tiny.CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    # The settings of FLUX.1-dev.
    shift = {"shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
    return getattr(diffusers, stock)(
        transformer=transformer.eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=4096, **shift),
        vae=tiny.image_vae(config.contrast, scaling_factor=0.3611, shift_factor=0.1159, **vae),
        text_encoder=tiny.clip_text_encoder(CLIPTextModel, clip),
        tokenizer=clip,
        text_encoder_2=tiny.t5_encoder(t5),
        tokenizer_2=t5,
    )
