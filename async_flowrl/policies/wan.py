"""The model family Wan, text to video: latents are [16, frames, h, w]; without `rollout.frames` it makes images."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.resolution import Resolution, frames_of
from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies import tiny
from async_flowrl.policies.experts import Experts
from async_flowrl.policies.pipeline import PipelinePolicy, on_host, scale_factor
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.stored import EXPERTS, FOLDER
from async_flowrl.types import Conditioning, Sampling

TEXT_TOKENS = 512  # Default of `max_sequence_length` in WanPipeline.__call__.
_FRAMES_PER_LATENT = 4


class WanPolicy(PipelinePolicy):
    """Policy of Wan 2.1 and 2.2. `true_cfg_scale` is the scale of plain classifier-free guidance."""

    family, title, stock_guidance = "wan", "Wan", "guidance_scale"
    vae_stages = "temperal_downsample"
    makes_videos = pads_texts = True
    # The layers of both attentions of a block.
    lora_targets: Sequence[str] = tuple(
        f"attn{which}.{layer}" for which in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")
    )

    def __init__(self, *parts: Any, max_sequence_length: int | None = None, **options: Any) -> None:
        super().__init__(*parts, max_sequence_length=max_sequence_length or TEXT_TOKENS, **options)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        networks = [*self.transformer.children()] if self.experts else [self.transformer]
        return [block for network in networks for block in cast("Any", network).blocks]

    @property
    def experts(self) -> Sequence[str]:
        return EXPERTS if isinstance(self.transformer, Experts) else ()

    def _encode_one(self, text: str) -> Conditioning:
        return on_host(prompt_embeds=self._stock_encode(text, None, False)[0])

    def conditioning_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (self._text_tokens(TEXT_TOKENS), self._config.text_dim)}

    def _set_schedule(self, steps: int, tokens: int) -> None:
        self._scheduler.set_timesteps(steps)

    def latent_shape(self, resolution: Resolution) -> tuple[int, ...]:
        (rows, columns), frames = self._grid(resolution), frames_of(resolution) or 1
        if frames % _FRAMES_PER_LATENT != 1:
            nearest = _FRAMES_PER_LATENT * round((frames - 1) / _FRAMES_PER_LATENT) + 1
            raise ValueError(f"frames must be 1, 5, 9, … for {self.title}, got {frames}, nearest: {nearest}")
        _, height, width = self._config.patch_size
        return self._config.in_channels, 1 + frames // _FRAMES_PER_LATENT, height * rows, width * columns

    def _network(
        self, latents: Tensor, sigma: Tensor, branches: Sequence[Mapping[str, Tensor]], sampling: Sampling
    ) -> Tensor:
        return self._called(
            hidden_states=latents.to(self._dtype),
            timestep=1000 * sigma,
            encoder_hidden_states=self._rows(branches, "prompt_embeds", len(latents)),
        )

    def _scale(self, sigma: Tensor, sampling: Sampling) -> float | Tensor:
        scale, second = sampling.true_cfg_scale, sampling.true_cfg_scale_2
        if second is None or not isinstance(self.transformer, Experts):
            return scale
        high = 1000 * sigma >= self.transformer.boundary
        return torch.where(high, scale, second).view(-1, 1, 1, 1, 1)

    def _decoded(self, pipeline: Any, latents: Tensor, resolution: Resolution) -> Tensor:
        vae = pipeline.vae
        latents = latents.to(vae.dtype)
        mean, std = self._statistics(vae.config, latents)
        videos: Tensor = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
        return videos[:, :, 0] if frames_of(resolution) is None else videos

    @classmethod
    def pixels_per_token(cls, vae: Mapping[str, Any], transformer: Mapping[str, Any]) -> int:
        return int(vae_side(vae) * transformer["patch_size"][1])

    @classmethod
    def guidance_arguments(cls, sampling: Sampling) -> dict[str, Any]:
        second = {} if sampling.true_cfg_scale_2 is None else {"guidance_scale_2": sampling.true_cfg_scale_2}
        return super().guidance_arguments(sampling) | second


def vae_side(vae: Mapping[str, Any]) -> int:
    """Returns the side of one latent in pixels: 8, and 16 of Wan 2.2's own VAE, which cuts images into patches of 2."""
    return scale_factor(vae, WanPolicy.vae_stages) * int(vae.get("patch_size") or 1)


class WanFamily(PipelineFamily):
    policy = WanPolicy
    pipeline, transformer = "WanPipeline", "WanTransformer3DModel"
    text_tokens = TEXT_TOKENS
    scale_factor = staticmethod(vae_side)
    # The default of WanPipeline.__call__, diffusers 0.42, and its steps.
    usual_guidance = 5.0, 0.0
    usual_steps = 50

    def joined(self, networks: Mapping[str, nn.Module], ratio: float | None) -> nn.Module:
        return networks[FOLDER] if ratio is None else Experts(networks, 1000 * ratio)

    def components(self, network: nn.Module) -> dict[str, nn.Module]:
        return dict(network.named_children()) if isinstance(network, Experts) else super().components(network)


def tiny_pipeline(config: TinyConfig) -> Any:
    return _tiny(config, (FOLDER,))


def tiny_experts(config: TinyConfig) -> Any:
    pipeline = _tiny(config, EXPERTS, boundary_ratio=0.875)  # As Wan-AI/Wan2.2-T2V-A14B-Diffusers.
    tiny.spread_norms(pipeline)
    return pipeline


def _tiny(config: TinyConfig, folders: Sequence[str], **options: Any) -> Any:
    import diffusers
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = tiny.t5_tokenizer()
    sizes = {"d_model": tiny.T5_DIM, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    text_encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **sizes))
    networks = {
        folder: diffusers.WanTransformer3DModel(
            text_dim=tiny.T5_DIM,
            freq_dim=32,
            ffn_dim=32 * config.heads,
            **tiny.blocks(config),
        ).eval()
        for folder in folders
    }
    vae = diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=tiny.contrasted(vae, config.contrast),
        # The settings of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan-AI/Wan2.2-T2V-A14B-Diffusers.
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **networks,
        **options,
    )
