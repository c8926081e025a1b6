"""The model family Z-Image: latents are [16, h, w]; image and text tokens form one sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Sampling

_TEXT_BLOCK = 32
"""diffusers' SEQ_MULTI_OF."""
_POSITIONS = 1024, 512, 512
"""Positions of text, rows and columns if a stored configuration does not name them: diffusers' default."""


class ZImagePolicy(PipelinePolicy):
    """Policy of Z-Image and Z-Image-Turbo."""

    family = "z_image"
    title = "Z-Image"
    # All linear layers of a block. Image and text share them, so each of them changes the output.
    lora_targets: Sequence[str] = (
        "attention.to_q",
        "attention.to_k",
        "attention.to_v",
        "attention.to_out.0",
        "feed_forward.w1",
        "feed_forward.w2",
        "feed_forward.w3",
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
        """Returns {"prompt_embeds": [L, D]} for a prompt of L tokens, without padding."""
        (embeds,), _ = self._stock_encode(text, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape for a prompt of `planned_tokens`; prompts are not padded."""
        return {"prompt_embeds": (min(self.planned_tokens, self._text_tokens(512)), self._config.cap_feat_dim)}

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        # The network's time runs from noise to image and it predicts x0 - eps; it takes lists, one entry per row.
        each = len(latents) // len(branches)
        texts = [branch["prompt_embeds"].to(self._dtype) for branch in branches]
        out = self.transformer(
            list(latents.to(self._dtype).unsqueeze(2).unbind(0)),
            (1000 - 1000 * sigma) / 1000,
            [text for text in texts for _ in range(each)],
            return_dict=False,
        )[0]
        return -torch.stack([row.float() for row in out]).squeeze(2)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        """Returns the diffusers pipeline's arguments. It computes c + g (c - u), so its guidance_scale g is w - 1."""
        return {"guidance_scale": max(0.0, sampling.true_cfg_scale - 1), "negative_prompt": sampling.negative_prompt}


class ZImageFamily(PipelineFamily):
    """Loads Z-Image from a diffusers folder or a hub name."""

    policy = ZImagePolicy
    pipeline, transformer = "ZImagePipeline", "ZImageTransformer2DModel"
    layer_keys = ("n_layers",)
    # For Z-Image-Turbo, from the example of ZImagePipeline.__call__, diffusers 0.40.
    usual_guidance = 1.0, 0.0
    usual_steps = 8

    def framed(self, tokenizer: Any, text: str, limit: int) -> tuple[str, int, int]:
        """The prompt stands in a chat template, whose tokens count."""
        chat = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        return whole, whole.index(text), limit
