"""SANA as a family of one's own: its stock pipeline puts an instruction before the prompt, which is easily missed."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model, Qwen2Tokenizer

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

_TEXT = 32


class SanaPolicy(PipelinePolicy):
    """Without guidance: a negative prompt would be encoded without the instruction."""

    family = title = "SANA"
    lora_targets: Sequence[str] = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q", "attn2.to_k", "attn2.to_v")

    def _instruction(self) -> Any:
        return inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default

    def _encode_one(self, text: str) -> Conditioning:
        embeds, mask, *_ = self._whole("encode prompts").encode_prompt(
            text, False, complex_human_instruction=self._instruction(), **self._text_options
        )
        return {"prompt_embeds": embeds[0].float().cpu().numpy(), "mask": mask[0].float().cpu().numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        length = self._text_tokens(300)
        return {"prompt_embeds": (length, self._config.caption_channels), "mask": (length,)}

    def _set_schedule(self, steps: int, tokens: int) -> None:
        self._scheduler.set_timesteps(steps)

    def latent_shape(self, resolution: int) -> tuple[int, int, int]:
        return int(self._config.in_channels), *self._grid(resolution)

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        out = self.transformer(
            latents.to(self._dtype),
            encoder_hidden_states=self._rows(branches, "prompt_embeds", len(latents)),
            encoder_attention_mask=self._rows(branches, "mask", len(latents)),
            timestep=sigma * 1000 * self._config.timestep_scale,
            return_dict=False,
        )[0]
        return cast("Tensor", out).float()

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: int) -> Tensor:
        vae = pipeline.vae
        return cast("Tensor", vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0])

    @classmethod
    def pixels_per_token(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> int:
        return int(2 ** (len(vae["encoder_block_out_channels"]) - 1))

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        return {"guidance_scale": sampling.true_cfg_scale, "negative_prompt": sampling.negative_prompt}


class SanaFamily(PipelineFamily):
    policy = SanaPolicy
    pipeline, transformer = "SanaPipeline", "SanaTransformer2DModel"
    usual_guidance = 1.0, 0.0
    usual_steps = 20


class BarePolicy(SanaPolicy):
    """As one writes it who has not seen the default of the stock pipeline's `__call__`."""

    def _instruction(self) -> Any:
        return None


class BareFamily(SanaFamily):
    policy = BarePolicy


def tiny_pipeline(config: TinyConfig) -> Any:
    """The pipeline in memory; its weights come from the global CPU generator."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    tokenizer = Qwen2Tokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=[])
    text = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=_TEXT,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    transformer = SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=config.layers,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_TEXT,
        sample_size=8,
    )
    vae = AutoencoderDC(
        latent_channels=8,
        encoder_block_out_channels=(8, 16, 16),
        decoder_block_out_channels=(8, 16, 16),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.4,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(text).eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
