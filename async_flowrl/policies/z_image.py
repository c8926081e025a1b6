"""Z-Image: latents [16, h, w], one stream of image and text tokens, text of its true length."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Resolution, Sampling


class ZImagePolicy(PipelinePolicy):
    """Policy of Z-Image and Z-Image-Turbo."""

    family = "z_image"
    title = "Z-Image"
    # All linear layers of a block; image and text share them, so none is dead.
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
        """Image refiner, text refiner, then the main layers."""
        stages = (self.transformer.noise_refiner, self.transformer.context_refiner, self.transformer.layers)
        return [block for stage in stages for block in cast("nn.ModuleList", stage)]

    def _encode_one(self, text: str) -> Conditioning:
        """{"prompt_embeds": [L, D]}, L the prompt's true length."""
        pipeline = self._whole("encode prompts")
        (embeds,), _ = pipeline.encode_prompt(
            text, device=pipeline.text_encoder.device, do_classifier_free_guidance=False, **self._text_options
        )
        return {"prompt_embeds": embeds.float().cpu().numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        """A prompt of 128 tokens; nothing is padded."""
        return {"prompt_embeds": (128, self._config.cap_feat_dim)}

    def latent_shape(self, resolution: Resolution) -> tuple[int, int, int]:
        """[channels, h, w]."""
        rows, columns = self._grid(resolution)
        return int(self._config.in_channels), 2 * rows, 2 * columns

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        """The network counts time from noise to image and predicts x0 - eps; it takes one list entry per row."""
        each = len(latents) // len(branches)
        texts = [branch["prompt_embeds"].to(self._dtype) for branch in branches]
        out = self.transformer(
            list(latents.to(self._dtype).unsqueeze(2).unbind(0)),
            1 - sigma,
            [text for text in texts for _ in range(each)],
            return_dict=False,
        )[0]
        return -torch.stack([row.float() for row in out]).squeeze(2)

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        """The stock pipeline writes c + g (c - u), so g = w - 1, and guides for any g above 0."""
        return {"guidance_scale": max(0.0, sampling.true_cfg_scale - 1), "negative_prompt": sampling.negative_prompt}


class ZImageFamily(PipelineFamily):
    """Loads Z-Image from a diffusers folder or a hub name."""

    policy = ZImagePolicy
    pipeline, transformer = "ZImagePipeline", "ZImageTransformer2DModel"
    # Of Z-Image-Turbo, as in the example of ZImagePipeline.__call__, diffusers 0.40.
    usual_guidance = 1.0, 0.0
    usual_steps = 8
