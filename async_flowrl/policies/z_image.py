"""The model family Z-Image: latents are [16, h, w]; image and text tokens form one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

# diffusers' SEQ_MULTI_OF.
_TEXT_BLOCK = 32
# Positions of text, rows and columns if a stored configuration does not name them: diffusers' default.
_POSITIONS = 1024, 512, 512
_TINY_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


class ZImagePolicy(PipelinePolicy):
    """Policy of Z-Image and Z-Image-Turbo."""

    family = "z_image"
    title = "Z-Image"
    # All linear layers of a block. Image and text share them, so each of them changes the output.
    lora_targets: Sequence[str] = (
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    )

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks of the image refiner, of the text refiner, and the main layers."""
        stages = (self.transformer.noise_refiner, self.transformer.context_refiner, self.transformer.layers)
        return [block for stage in stages for block in cast("nn.ModuleList", stage)]

    @property
    def longest_text(self) -> int:
        """Texts are padded to whole blocks; the image's positions follow theirs in the same table."""
        positions, *_ = getattr(self._config, "axes_lens", _POSITIONS)
        return (int(positions) - 2) // _TEXT_BLOCK * _TEXT_BLOCK

    @property
    def largest_grid(self) -> tuple[int, int]:
        """The network looks rows and columns up in tables; beyond their ends CUDA would stop the process."""
        _, rows, columns = getattr(self._config, "axes_lens", _POSITIONS)
        return int(rows), int(columns)

    def _encode_one(self, text: str) -> Conditioning:
        (embeds,), _ = self._stock_encode(text, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (min(self.planned_tokens, self._text_tokens(512)), self._config.cap_feat_dim)}

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        # The network's time runs from noise to image and it predicts x0 - eps; it takes lists, one entry per row.
        rows = len(latents) // len(branches)
        texts = [branch["prompt_embeds"].to(self._dtype) for branch in branches]
        out = self.transformer(
            list(latents.to(self._dtype).unsqueeze(2).unbind(0)),
            (1000 - 1000 * sigma) / 1000,
            [text for text in texts for _ in range(rows)],
            return_dict=False,
        )[0]
        return -torch.stack([image.float() for image in out]).squeeze(2)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        """Returns the diffusers pipeline's arguments. It computes c + g (c - u), so its guidance_scale g is w - 1."""
        return {"guidance_scale": max(0.0, sampling.true_cfg_scale - 1), "negative_prompt": sampling.negative_prompt}


class ZImageFamily(PipelineFamily):
    policy = ZImagePolicy
    pipeline, transformer = "ZImagePipeline", "ZImageTransformer2DModel"
    layer_keys = ("n_layers",)
    # For Z-Image-Turbo, from the example of ZImagePipeline.__call__, diffusers 0.40.
    usual_guidance = 1.0, 0.0
    usual_steps = 8

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        return in_chat(tokenizer, text, limit, thinking=True)


def in_chat(tokenizer: Any, text: str, limit: int, *, thinking: bool) -> tuple[str, int, int]:
    """Returns what `framed` does for a prompt in Qwen3's chat template, whose tokens count."""
    chat, options = [{"role": "user", "content": text}], {"tokenize": False, "add_generation_prompt": True}
    whole = tokenizer.apply_chat_template(chat, enable_thinking=thinking, **options)
    return whole, whole.index(text), limit


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a tiny Z-Image: a refiner block each for image and text, then the main layers."""
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Model

    tokenizer = tiny_tokenizer()
    transformer = ZImageTransformer2DModel(
        dim=16 * config.heads,
        n_layers=config.layers,
        n_refiner_layers=1,
        n_heads=config.heads,
        n_kv_heads=config.heads,
        cap_feat_dim=tiny.TEXT_DIM,
        axes_dims=[4, 4, 8],
        axes_lens=[256, 64, 64],
    )
    return ZImagePipeline(
        transformer=transformer.eval(),
        # The settings of Z-Image-Turbo.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny.image_vae(config.contrast, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=tiny_text_encoder(Qwen3Model, tokenizer, 2),
        tokenizer=tokenizer,
    )


def tiny_tokenizer() -> Any:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tiny.byte_tokenizer(additional_special_tokens=list(tiny.SPECIAL), chat_template=_TINY_TEMPLATE, **special)


def tiny_text_encoder(kind: Any, tokenizer: Any, layers: int) -> Any:
    """Returns a tiny Qwen3 of class `kind` (Qwen3Model or Qwen3ForCausalLM)."""
    from transformers import Qwen3Config

    sizes = {"hidden_size": tiny.TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": layers, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return kind(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **ids)).eval()
