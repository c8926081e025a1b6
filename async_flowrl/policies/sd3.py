"""The model family Stable Diffusion 3 and 3.5: latents are [16, h, w]; there are three text encoders."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from async_flowrl.policies.base import JOINT_ATTENTION
from async_flowrl.policies.pipeline import PipelinePolicy, on_host
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

_POSITIONS = 96
"""Positions along each side if a stored configuration does not name them: diffusers' default."""


class SD3Policy(PipelinePolicy):
    """Policy of SD3 and SD3.5. `true_cfg_scale` is the scale of plain classifier-free guidance."""

    family = "sd3"
    title = "Stable Diffusion 3"
    names_patch_size = True
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
        """Returns {"prompt_embeds": [77 + L, D], "pooled_prompt_embeds": [P]}: tokens of CLIP, then of T5, padded."""
        embeds, _, pooled, _ = self._stock_encode(text, None, None, do_classifier_free_guidance=False)
        return on_host(prompt_embeds=embeds, pooled_prompt_embeds=pooled)

    def _set_schedule(self, steps: int, tokens: int) -> None:
        """Sets the scheduler's own levels; they depend on the image size only if the model's scheduler says so."""
        dynamic = {"mu": self._shift(tokens)} if self._scheduler.config.get("use_dynamic_shifting") else {}
        self._scheduler.set_timesteps(steps, device="cpu", **dynamic)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "prompt_embeds": (77 + self._text_tokens(256), self._config.joint_attention_dim),
            "pooled_prompt_embeds": (self._config.pooled_projection_dim,),
        }

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        out = self.transformer(
            hidden_states=latents.to(self._dtype),
            timestep=sigma * 1000,
            encoder_hidden_states=self._rows(branches, "prompt_embeds", len(latents)),
            pooled_projections=self._rows(branches, "pooled_prompt_embeds", len(latents)),
            return_dict=False,
        )[0]
        return cast("Tensor", out).float()


class SD3Family(PipelineFamily):
    """Loads SD3 or SD3.5 from a diffusers folder or a hub name."""

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
