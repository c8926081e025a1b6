"""A model family for a video model, written as a user would add one, for tests.

Its latents have the shape [channels, frames, h, w], so code outside a family's file that assumes image latents fails.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn

from async_flowrl.policies.pipeline import PipelinePolicy, Shapes
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.types import Conditioning, Prompt, Sampling

CHANNELS, FRAMES, TEXT = 4, 3, 6


class VideoTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """A small network. At each position it mixes latents, their mean over frames, the text and the noise level."""

    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([nn.Linear(2 * CHANNELS + TEXT + 1, width), nn.Linear(width, width)])
        self.out = nn.Linear(width, CHANNELS)

    def forward(self, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        n, _, frames, height, width = latents.shape
        everywhere = torch.cat([text, sigma[:, None]], dim=1)[:, :, None, None, None]
        mean = latents.mean(dim=2, keepdim=True).expand_as(latents)
        x = torch.cat([latents, mean, everywhere.expand(n, TEXT + 1, frames, height, width)], dim=1).movedim(1, -1)
        for block in self.transformer_blocks:
            x = torch.tanh(block(x))
        return self.out(x).movedim(-1, 1)


class VideoPolicy(PipelinePolicy):
    family = title = "video"
    lora_targets: Sequence[str] = ("transformer_blocks.0", "transformer_blocks.1")

    def _encode_one(self, text: str) -> Conditioning:
        numbers = torch.tensor([float(ord(c)) / 128 for c in text[:TEXT].ljust(TEXT)])
        return {"prompt_embeds": numbers.numpy()}

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (TEXT,)}

    def _set_schedule(self, steps: int, tokens: int) -> None:
        self._scheduler.set_timesteps(steps)

    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        rows, columns = self._grid(resolution)
        return CHANNELS, FRAMES, rows, 2 * columns

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        return self.transformer(latents, sigma, self._rows(branches, "prompt_embeds", len(latents)))

    def decode(self, latents: Tensor, resolution: int) -> Tensor:
        """Returns the first three channels of the first frame, enlarged by 4, as images uint8 [n, H, W, 3]."""
        pixels = torch.sigmoid(latents[:, :3, 0]).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        return (pixels * 255).byte().movedim(1, -1).contiguous()

    @classmethod
    def pixels_per_token(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> int:
        return 8


class VideoFamily(PipelineFamily):
    policy = VideoPolicy
    pipeline, transformer = "VideoPipeline", "VideoTransformer"
    usual_guidance = (1.0, 0.0)
    usual_steps = 4

    def load(self, path: str, *, dtype: torch.dtype, device: torch.device, parts: str, **_: Any) -> VideoPolicy:
        transformer = VideoTransformer.from_pretrained(path, subfolder="transformer").to(device, dtype)
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return VideoPolicy(transformer, scheduler, side=8, dtype=dtype, pipeline="whole" if parts == "all" else None)

    def shapes(self, path: str, resolution: int, **_: Any) -> Shapes:
        return Shapes((CHANNELS, FRAMES, resolution // 8, 2 * resolution // 8), {"prompt_embeds": (TEXT,)})

    def check_prompts(self, prompts: Sequence[Prompt], path: str, **_: Any) -> None:
        raise ValueError(f"videos have no system prompt, prompt {prompts[0].index} brings one")


def build_video(folder: Path) -> Path:
    """Writes the model's index and random weights into `folder` and returns it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        VideoTransformer().save_pretrained(folder / "transformer")
    (folder / "model_index.json").write_text('{"_class_name": "VideoPipeline"}')
    return folder
