"""Qwen-Image (and its tiny twin): packed latents [tokens, 64], true classifier-free guidance with norm rescale."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift, retrieve_timesteps
from torch import Tensor, nn

from async_flowrl.policies.loading import quiet, settle, weight_options
from async_flowrl.types import ByteArray, Conditioning, Sampling

_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
_MLP = ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")


class QwenImagePolicy:
    """Policy of Qwen-Image. `pipeline` is None in trainer processes: no text encoder, no VAE."""

    family = "qwen_image"
    lora_targets: Sequence[str] = (*_ATTENTION, *_MLP)

    def __init__(
        self, transformer: nn.Module, scheduler: Any, *, side: int, dtype: torch.dtype, pipeline: Any | None = None
    ) -> None:
        """`side`: pixels per latent token and side (VAE factor times patch size)."""
        self.transformer = transformer
        self._scheduler, self._side, self._dtype, self._pipeline = scheduler, side, dtype, pipeline
        self._config = cast("Any", transformer).config
        if self._config.guidance_embeds:
            raise ValueError("Qwen-Image with embedded guidance (guidance_embeds=true) is not supported by diffusers")
        self._schedules: dict[tuple[int, int], Tensor] = {}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(cast("nn.ModuleList", self.transformer.transformer_blocks))

    @property
    def lora_exclude(self) -> str:
        """The last block's text output is dropped by the network, so these get no gradient at all; its text query
        feeds only that output, so its gradient is always zero."""
        last = self._config.num_layers - 1
        return rf"transformer_blocks\.{last}\.(attn\.to_add_out|attn\.add_q_proj|txt_mlp\..*)"

    @torch.no_grad()
    def encode(self, texts: Sequence[str], system: str | None = None) -> list[Conditioning]:
        """{"prompt_embeds": [L, D] float32} per text, L its true length; `system` replaces the template's own.

        One text at a time: padding to a batch neighbour's length would change the last bits.
        """
        with system_prompt(self._whole("encode prompts"), system):
            return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> Conditioning:
        pipeline = self._whole("encode prompts")
        embeds, mask = pipeline.encode_prompt(text, device=pipeline.text_encoder.device)
        if mask is not None:
            embeds = embeds[:, mask[0].bool()]
        return {"prompt_embeds": embeds[0].float().cpu().numpy()}

    def sigmas(self, num_inference_steps: int, resolution: int) -> Tensor:
        """The pipeline's schedule (dynamic shift by image tokens), float32 [T+1], exactly 1 first and exactly 0 last.

        Raises ValueError for fewer than 2 steps, which the schedule's stretch to its terminal value divides by zero.
        """
        key = num_inference_steps, resolution
        if key not in self._schedules:
            self._schedules[key] = self._schedule(num_inference_steps, self.latent_shape(resolution)[0])
        return self._schedules[key].clone()

    def _schedule(self, steps: int, tokens: int) -> Tensor:
        if steps < 2:
            raise ValueError(f"num_inference_steps must be at least 2 for Qwen-Image's schedule, got {steps}")
        config = self._scheduler.config
        mu = calculate_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        retrieve_timesteps(self._scheduler, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        sigmas = cast("Tensor", self._scheduler.sigmas).to("cpu", torch.float32).clone()
        if sigmas[0] != 1 or sigmas[-1] != 0 or not bool((sigmas.diff() < 0).all()):
            raise ValueError(f"the model's scheduler gives no schedule that falls from 1 to 0: {sigmas.tolist()}")
        return sigmas

    def latent_shape(self, resolution: int) -> tuple[int, int]:
        """[tokens, 64] of a square image."""
        if resolution < self._side or resolution % self._side:
            nearest = max(self._side, round(resolution / self._side) * self._side)
            raise ValueError(f"resolution must be a multiple of {self._side}, got {resolution}, nearest: {nearest}")
        return (resolution // self._side) ** 2, int(self._config.in_channels)

    def velocity(
        self,
        latents: Tensor,
        sigma: Tensor,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor] | None,
        sampling: Sampling,
    ) -> Tensor:
        """Guided velocity [n, tokens, 64] float32 of `latents` [n, tokens, 64] at noise level `sigma` [n] float32.

        True CFG as in QwenImagePipeline: v = u + w (c - u), then each token's norm is set back to that of c. Both
        branches go in one batch, the shorter text padded and masked, with gradients through both.
        """
        side = sampling.resolution // self._side
        if latents.shape[1:] != self.latent_shape(sampling.resolution):
            raise ValueError(f"latents {tuple(latents.shape)} are not those of {sampling.resolution} px images")
        if sampling.guidance_scale > 0:
            raise ValueError(
                f"rollout.guidance_scale must be 0 for Qwen-Image, got {sampling.guidance_scale}; use true_cfg_scale"
            )
        if sampling.true_cfg_scale <= 1:
            return self._forward(latents, sigma, _text([positive], len(latents), self._dtype), side)
        if negative is None:
            raise ValueError(f"true_cfg_scale {sampling.true_cfg_scale} needs the negative prompt's conditioning")
        text = _text([positive, negative], len(latents), self._dtype)
        both: Tensor = self._forward(torch.cat([latents, latents]), torch.cat([sigma, sigma]), text, side)
        conditional, unconditional = both.chunk(2)
        combined = unconditional + sampling.true_cfg_scale * (conditional - unconditional)
        rescale: Tensor = conditional.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)
        return combined * rescale

    def _forward(self, latents: Tensor, sigma: Tensor, text: tuple[Tensor, Tensor | None], side: int) -> Tensor:
        """Only the network's input is cast to its dtype; sigma goes in and the velocity comes out as float32."""
        out = self.transformer(
            hidden_states=latents.to(self._dtype),
            timestep=sigma,
            encoder_hidden_states=text[0],
            encoder_hidden_states_mask=text[1],
            img_shapes=[[(1, side, side)]] * len(latents),
            return_dict=False,
        )[0]
        return cast("Tensor", out).float()

    @torch.no_grad()
    def decode(self, latents: Tensor, resolution: int) -> ByteArray:
        """Images uint8 [n, H, W, 3] of final latents [n, tokens, 64], rounded as diffusers' image processor does."""
        pipeline = self._whole("decode images")
        vae = pipeline.vae
        unpacked = pipeline._unpack_latents(latents, resolution, resolution, pipeline.vae_scale_factor).to(vae.dtype)
        mean, std = (
            torch.tensor(values, device=unpacked.device, dtype=unpacked.dtype).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # Divided by the reciprocal, as the pipeline does: the same bits as its images.
        decoded = vae.decode(unpacked / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]
        images = pipeline.image_processor.postprocess(decoded, output_type="np")
        return cast("ByteArray", (images * 255).round().astype(np.uint8))

    def _whole(self, purpose: str) -> Any:
        if self._pipeline is None:
            raise RuntimeError(f"this process loaded only the transformer and cannot {purpose}")
        return self._pipeline


@contextmanager
def system_prompt(pipeline: Any, system: str | None) -> Iterator[None]:
    """Inside, the pipeline's prompt template carries `system` in place of its own system prompt; None leaves it.

    The pipeline drops as many tokens of the encoded text as the template has before the user's words.
    """
    kept = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    if system is not None:
        before, rest = kept[0].split("system\n", 1)
        after = rest[rest.index("<|im_end|>") :]
        prefix = before + "system\n" + system + after.split("{}")[0]
        pipeline.prompt_template_encode = f"{before}system\n{system.replace('{', '{{').replace('}', '}}')}{after}"
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
    try:
        yield
    finally:
        pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx = kept


def _text(branches: list[Mapping[str, Tensor]], n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Embeddings [len(branches) * n, L, D] and their mask [.., L], None where no branch needs padding."""
    embeds = [branch["prompt_embeds"].to(dtype) for branch in branches]
    lengths = [len(e) for e in embeds]
    longest = max(lengths)
    padded = [torch.nn.functional.pad(e, (0, 0, 0, longest - len(e))).expand(n, -1, -1) for e in embeds]
    if min(lengths) == longest:
        return torch.cat(padded), None
    positions = torch.arange(longest, device=embeds[0].device)
    mask = torch.cat([(positions < length).expand(n, -1) for length in lengths])
    return torch.cat(padded), mask


class QwenImageFamily:
    """Loads Qwen-Image from a diffusers folder or a hub name."""

    def load(
        self, path: str, *, dtype: torch.dtype, device: torch.device, parts: str, revision: str | None = None
    ) -> QwenImagePolicy:
        """`parts` is "all" or "transformer" (no text encoder, no VAE weights)."""
        weights = weight_options(dtype, revision)
        pipeline = None
        with quiet():
            if parts == "all":
                pipeline = QwenImagePipeline.from_pretrained(path, **weights)
                transformer, scheduler = pipeline.transformer, pipeline.scheduler
                modules = [transformer, pipeline.vae, pipeline.text_encoder]
            else:
                transformer = QwenImageTransformer2DModel.from_pretrained(path, subfolder="transformer", **weights)
                scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                    path, subfolder="scheduler", revision=revision
                )
                modules = [transformer]
            vae_config = AutoencoderKLQwenImage.load_config(path, subfolder="vae", revision=revision)
        for module in modules:
            settle(module, device)
        factor = 2 ** len(vae_config["temperal_downsample"])
        side = factor * int(transformer.config.patch_size)
        return QwenImagePolicy(transformer, scheduler, side=side, dtype=dtype, pipeline=pipeline)
