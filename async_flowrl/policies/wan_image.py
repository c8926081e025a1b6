"""The model family Wan, image to video: a prompt's image is the first frame. Wan 2.1 and 2.2 I2V, and TI2V-5B.

The I2V models get the image's latents as more channels of their input, Wan 2.1's its CLIP embeddings, too. In TI2V-5B
they are the first frame's latents, and its tokens have the time 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.resolution import Resolution, frames_of, height_width
from async_flowrl.config.schema import TinyConfig
from async_flowrl.image_file import opened
from async_flowrl.policies import wan
from async_flowrl.policies.pipeline import on_host, untiled
from async_flowrl.policies.stored import configuration
from async_flowrl.types import Conditioning, EncoderInput, Sampling, TextWithImages

_CLIP_TOKENS = 257  # Of CLIP ViT-H/14 for an image.


class WanImagePolicy(wan.WanPolicy):
    family, title = "wan_image", "Wan image to video"
    images = (1, 1)

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        tokens = self._text_tokens(wan.TEXT_TOKENS)
        # The network tells tokens of the image from tokens of the text by this number.
        if self._config.image_dim is not None and tokens != wan.TEXT_TOKENS:
            raise ValueError(f"model.max_sequence_length must be {wan.TEXT_TOKENS} for this Wan 2.1, got {tokens}")

    @property
    def _fixes_first_frame(self) -> bool:
        """True for TI2V-5B; False if the image comes in channels of the input."""
        return bool(self._config.in_channels == self._config.out_channels)

    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
        if (frames_of(resolution) or 1) == 1:
            raise ValueError(f"frames must be 5, 9, … for {self.title} (rollout.frames), got {frames_of(resolution)}")
        return self._config.out_channels, *super().latent_shape(resolution)[1:]

    def _encoded(self, text: EncoderInput, encode: Callable[[str], Conditioning]) -> Conditioning:
        """Returns "prompt_embeds", "condition" (latents of the image, and a mask before those of more channels), …"""
        self.check_images(len(text.images) if isinstance(text, TextWithImages) else 0)
        if not isinstance(text, TextWithImages) or text.size is None:
            raise ValueError(f"{self.title} encodes an image for a size of videos, got none")
        pipeline, size, (image,) = self.whole("encode images"), text.size, map(opened, text.images)
        height, width = height_width(size)
        pixels = pipeline.video_processor.preprocess(image, height=height, width=width)
        latents = torch.zeros(1, *self.latent_shape(size))
        sizes = {"num_channels_latents": latents.shape[1], "height": height, "width": width}
        with untiled(pipeline.vae):
            condition = pipeline.prepare_latents(
                pixels, 1, **sizes, num_frames=frames_of(size), dtype=torch.float32, device="cpu", latents=latents
            )[1]
        known = {"prompt_embeds": self._stock_encode(text.text, None, False)[0], "condition": condition}
        if self._config.image_dim is not None:
            known["image_embeds"] = pipeline.encode_image(image, pipeline.image_encoder.device)
        return on_host(**known)

    def encode_image(self, image: Tensor) -> Tensor:
        """Returns the VAE's latents [1, C, frames, h, w] of an image [1, 3, H, W] as a video of `planned_size`."""
        frames = 1 if self._fixes_first_frame else frames_of(self.planned_size) or 1
        return self._mode(image.unsqueeze(2).expand(-1, -1, frames, -1, -1))

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        channels, frames, *sides = self.latent_shape(self.planned_size)
        more = self._config.in_channels - channels
        known = {"condition": (channels, 1, *sides) if self._fixes_first_frame else (more, frames, *sides)}
        if self._config.image_dim is not None:
            known["image_embeds"] = _CLIP_TOKENS, self._config.image_dim
        return super().conditioning_shapes() | known

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        each = len(latents) // len(branches)
        condition = torch.cat([image.expand(each, *image.shape) for image in (b["condition"] for b in branches)])
        texts = {"encoder_hidden_states": self._rows(branches, "prompt_embeds", len(latents))}
        if "image_embeds" in branches[0]:
            texts["encoder_hidden_states_image"] = self._rows(branches, "image_embeds", len(latents))
        if not self._fixes_first_frame:
            rows = torch.cat([latents, condition], dim=1).to(self._dtype)
            return self._called(hidden_states=rows, timestep=1000 * sigma, **texts)
        _, frames, height, width = latents.shape[1:]
        _, rows_of, columns_of = self._config.patch_size
        times = torch.ones(1, frames, height // rows_of * (width // columns_of), device=latents.device)
        times[:, 0] = 0.0
        made = self._called(
            hidden_states=torch.cat([condition, latents[:, :, 1:]], dim=2).to(self._dtype),
            timestep=(1000 * sigma.view(-1, 1, 1) * times).flatten(1),
            **texts,
        )
        # The straight way to the image: so the last latents have it, and no weights change its densities.
        first = (latents[:, :, :1] - condition) / sigma.view(-1, 1, 1, 1, 1)
        return torch.cat([first, made[:, :, 1:]], dim=2)


class WanImageFamily(wan.WanFamily):
    policy = WanImagePolicy
    pipeline = "WanImageToVideoPipeline"

    def own_parts(self, path: str | None, revision: str | None = None) -> dict[str, Any]:
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        if path is None or configuration(path, "transformer", revision).get("image_dim") is None:
            return {}
        # Pillow's, whether or not torchvision is there: an image has the same bits on every machine.
        processor = CLIPImageProcessorPil.from_pretrained(path, subfolder="image_processor", revision=revision)
        return {"image_processor": processor}


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a tiny Wan 2.1 I2V, whose images CLIP sees."""
    import diffusers
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    side, sizes = 28, {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = wan.tiny_pipeline(config)
    seen = CLIPVisionConfig(image_size=side, patch_size=14, **sizes)
    width = 16 * config.heads
    network = diffusers.WanTransformer3DModel.from_config(
        made.transformer.config, in_channels=36, image_dim=16, added_kv_proj_dim=width
    )
    return diffusers.WanImageToVideoPipeline(
        **made.components | {"transformer": network.eval()},
        image_encoder=CLIPVisionModel(seen).eval(),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
    )
