"""The model family FLUX.1: latents are [tokens, 64], and FLUX.1-dev takes the guidance scale as a network input."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution, height_width
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.base import JOINT_ATTENTION
from async_flowrl.policies.pipeline import PipelinePolicy, on_host
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

_MLP = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")


class FluxPolicy(PipelinePolicy):
    """Policy of FLUX.1-dev (guidance scale as network input) and FLUX.1-schnell; both also allow true CFG."""

    family = "flux"
    title = "FLUX.1"
    packs_tokens = pads_texts = True
    most_tokens = 512
    # As in flow_grpo's FLUX scripts. `attn.to_q`, `to_k` and `to_v` also exist in the single-stream blocks.
    lora_targets: Sequence[str] = (*JOINT_ATTENTION, *_MLP)

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

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "prompt_embeds": (self._text_tokens(512), self._config.joint_attention_dim),
            "pooled_prompt_embeds": (self._config.pooled_projection_dim,),
        }

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        embeds = self._rows(branches, "prompt_embeds", len(latents))
        guidance = torch.full_like(sigma, sampling.guidance_scale) if self.embeds_guidance else None
        return self._called(
            hidden_states=latents.to(self._dtype),
            timestep=self._time(sigma),
            guidance=guidance,
            encoder_hidden_states=embeds,
            pooled_projections=self._rows(branches, "pooled_prompt_embeds", len(latents)),
            txt_ids=embeds.new_zeros(embeds.shape[1], 3),
            img_ids=_positions(self._grid(sampling.resolution), embeds),
        )

    def _unpacked(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        unpacked = pipeline._unpack_latents(latents, *height_width(resolution), pipeline.vae_scale_factor)
        return cast("Tensor", unpacked)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        return {**super().guidance_arguments(sampling), "guidance_scale": sampling.guidance_scale}


def _positions(grid: tuple[int, int], like: Tensor) -> Tensor:
    sides = (torch.arange(side, device=like.device, dtype=like.dtype) for side in grid)
    row, column = torch.meshgrid(*sides, indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).reshape(-1, 3)


class FluxFamily(PipelineFamily):
    policy = FluxPolicy
    pipeline, transformer = "FluxPipeline", "FluxTransformer2DModel"
    tokenizer = "tokenizer_2"
    layer_keys = ("num_layers", "num_single_layers")
    # The defaults of FluxPipeline.__call__, diffusers 0.40.
    usual_guidance = 1.0, 3.5
    usual_steps = 28


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a tiny FLUX.1-dev with `layers` blocks of each kind; the global CPU generator draws its weights."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    clip, t5 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    transformer = FluxTransformer2DModel(
        num_layers=config.layers,
        num_single_layers=config.layers,
        attention_head_dim=16,
        num_attention_heads=config.heads,
        joint_attention_dim=tiny.T5_DIM,
        pooled_projection_dim=tiny.CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    # The settings of FLUX.1-dev.
    shift = {"shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
    return FluxPipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=4096, **shift),
        vae=tiny.image_vae(config.contrast, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=tiny.clip_text_encoder(CLIPTextModel, clip),
        tokenizer=clip,
        text_encoder_2=tiny.t5_encoder(t5),
        tokenizer_2=t5,
    )
