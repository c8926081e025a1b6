"""The model family SANA: latents are [32, h, w] with 32 pixels per side of a latent."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import PipelinePolicy, on_host
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling


class SanaPolicy(PipelinePolicy):
    """Policy of SANA and SANA-1.5. `true_cfg_scale` is the scale of plain classifier-free guidance."""

    family, title, size_step, stock_guidance = "sana", "SANA", 32, "guidance_scale"
    names_patch_size = pads_texts = True
    vae_stages = "encoder_block_out_channels"
    # The layers of both attentions of a block; its feed-forward part has only convolutions.
    lora_targets: Sequence[str] = tuple(
        f"attn{which}.{layer}" for which in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def _encode_one(self, text: str) -> Conditioning:
        # The text encoder reads the prompt after the instruction that is the default of the diffusers pipeline; the
        # pipeline then removes the instruction's embeddings.
        return self._read(text, instruction_of(type(self.whole("encode prompts"))))

    def _encode_negative(self, text: str) -> Conditioning:
        return self._read(text, None)

    def _read(self, text: str, instruction: Any) -> Conditioning:
        embeds, mask, *_ = self._stock_encode(text, False, complex_human_instruction=instruction)
        return on_host(prompt_embeds=embeds, prompt_attention_mask=mask)

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        length = self._text_tokens(300)
        return {"prompt_embeds": (length, self._config.caption_channels), "prompt_attention_mask": (length,)}

    def _set_schedule(self, steps: int, tokens: int) -> None:
        self._scheduler.set_timesteps(steps)

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        return self._called(
            hidden_states=latents.to(self._dtype),
            encoder_hidden_states=self._rows(branches, "prompt_embeds", len(latents)),
            encoder_attention_mask=self._rows(branches, "prompt_attention_mask", len(latents)),
            timestep=sigma * 1000 * self._config.timestep_scale,
        )

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        return cast("Tensor", vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0])


def instruction_of(pipeline: Any) -> list[str]:
    """Returns the lines that a diffusers pipeline of this class puts before every prompt."""
    lines: list[str] = inspect.signature(pipeline.__call__).parameters["complex_human_instruction"].default
    return lines


class SanaFamily(PipelineFamily):
    policy = SanaPolicy
    pipeline, transformer = "SanaPipeline", "SanaTransformer2DModel"
    # The defaults of SanaPipeline.__call__, diffusers 0.40.
    usual_guidance = 4.5, 0.0
    usual_steps = 20
    text_tokens = 300

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        """The instruction stands before the prompt, and what it takes is added to the limit."""
        from diffusers import SanaPipeline

        instruction = "\n".join(instruction_of(SanaPipeline))
        tokens, special = len(tokenizer.encode(instruction)), int(tokenizer.num_special_tokens_to_add())
        return instruction + text, len(instruction), tokens + limit - 2 - special


def tiny_pipeline(config: TinyConfig) -> Any:
    from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    tokenizer = tiny.byte_tokenizer()
    sizes = {"hidden_size": tiny.TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    transformer = SanaTransformer2DModel(
        in_channels=16,
        out_channels=16,
        **tiny.blocks(config),
        num_cross_attention_heads=config.heads,
        cross_attention_head_dim=16,
        cross_attention_dim=16 * config.heads,
        caption_channels=tiny.TEXT_DIM,
        sample_size=32,
    )
    stage = {"block_out_channels": (8, 16, 16, 16), "layers_per_block": (1,) * 4, "qkv_multiscales": ((),) * 4}
    stages: dict[str, Any] = {f"{part}coder_{key}": value for part in ("en", "de") for key, value in stage.items()}
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(vocab_size=len(tokenizer), **sizes, **heads)).eval(),
        vae=AutoencoderDC(latent_channels=16, scaling_factor=0.41407, **stages).eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
