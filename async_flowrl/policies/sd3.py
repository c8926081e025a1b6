"""The model family Stable Diffusion 3 and 3.5: latents are [16, h, w]; there are three text encoders."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import JOINT_ATTENTION, PipelinePolicy, on_host
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

# Positions along each side if a stored configuration does not name them: diffusers' default.
_POSITIONS = 96


class SD3Policy(PipelinePolicy):
    """Policy of SD3 and SD3.5. `true_cfg_scale` is the scale of plain classifier-free guidance."""

    family = "sd3"
    title = "Stable Diffusion 3"
    names_patch_size = pads_texts = True
    most_tokens = 512
    stock_guidance = "guidance_scale"
    # As in flow_grpo's SD3 scripts; the second attention of SD3.5-M gets no LoRA.
    lora_targets: Sequence[str] = JOINT_ATTENTION

    @property
    def lora_exclude(self) -> str:
        """The text query of the last block: only the text output would use it, and that block has none."""
        return rf"transformer_blocks\.{self._config.num_layers - 1}\.attn\.add_q_proj"

    @property
    def largest_grid(self) -> tuple[int, int] | None:
        """The network crops its table of positions, which is square. Without a table it computes any position."""
        side = getattr(self._config, "pos_embed_max_size", _POSITIONS)
        return (int(side), int(side)) if side else None

    def _encode_one(self, text: str) -> Conditioning:
        embeds, _, pooled, _ = self._stock_encode(text, None, None, do_classifier_free_guidance=False)
        return on_host(prompt_embeds=embeds, pooled_prompt_embeds=pooled)

    def _set_schedule(self, steps: int, tokens: int) -> None:
        dynamic = {"mu": self._shift(tokens, steps)} if self._scheduler.config.get("use_dynamic_shifting") else {}
        self._scheduler.set_timesteps(steps, device="cpu", **dynamic)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "prompt_embeds": (77 + self._text_tokens(256), self._config.joint_attention_dim),
            "pooled_prompt_embeds": (self._config.pooled_projection_dim,),
        }

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        return self._called(
            hidden_states=latents.to(self._dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=self._rows(branches, "prompt_embeds", len(latents)),
            pooled_projections=self._rows(branches, "pooled_prompt_embeds", len(latents)),
        )


class SD3Family(PipelineFamily):
    policy = SD3Policy
    pipeline, transformer = "StableDiffusion3Pipeline", "SD3Transformer2DModel"
    tokenizer, text_tokens = "tokenizer_3", 256
    usual_guidance = 4.5, 0.0
    # The default of StableDiffusion3Pipeline.__call__, diffusers 0.40.
    usual_steps = 28

    def stacks(self, transformer: Mapping[str, Any]) -> dict[str, int]:
        """The first blocks of SD3.5-medium have two attentions, the others, and all of other models, have one."""
        dual, whole = tuple(transformer.get("dual_attention_layers", ())), super().stacks(transformer)["num_layers"]
        return {"dual": len(dual), "single": whole - len(dual)} if dual == tuple(range(len(dual))) else {}

    def with_stacks(self, transformer: Mapping[str, Any], stacks: Mapping[str, int]) -> dict[str, Any]:
        dual = tuple(range(stacks["dual"]))
        return {**transformer, "num_layers": sum(stacks.values()), "dual_attention_layers": dual}


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a tiny SD 3.5 medium, whose first block has a second attention over image tokens alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    clip, t5 = tiny.clip_tokenizer(), tiny.t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=4,
        **tiny.blocks(config),
        joint_attention_dim=tiny.T5_DIM,
        caption_projection_dim=16 * config.heads,
        pooled_projection_dim=2 * tiny.CLIP_DIM,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        # The shift, and the VAE's scaling factor and shift factor, are those of SD 3.5.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny.image_vae(config.contrast, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=tiny.clip_text_encoder(CLIPTextModelWithProjection, clip),
        tokenizer=clip,
        text_encoder_2=tiny.clip_text_encoder(CLIPTextModelWithProjection, clip),
        tokenizer_2=clip,
        text_encoder_3=tiny.t5_encoder(t5),
        tokenizer_3=t5,
    )
