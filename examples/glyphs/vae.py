"""A small AutoencoderKLQwenImage (the VAE of Qwen-Image) for the glyphs example, trained on drawn words.

pretrain.py makes it with `small_vae` and `train_vae`; flow.py encodes images with `encode` and `normalise`.
"""

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import Tensor
from torch.nn import functional

from async_flowrl.types import ByteArray
from examples.glyphs.words import draw_many, pretraining_words

log = logging.getLogger(__name__)

_KL_WEIGHT = 1e-4
"""Weight of the KL divergence in the loss, beside the mean squared pixel error."""


@contextmanager
def single_frames() -> Iterator[None]:
    """Context in which the VAE's causal 3D convolutions run as 2D ones: the same numbers, a third of the work.

    Before a single frame the causal convolution pads with zeros, so only the kernel's last time slice has an effect.
    The change applies to the whole process; inputs of several frames still take the 3D convolution.
    """
    whole: Callable[..., Tensor] = QwenImageCausalConv3d.forward

    def flat(self: Any, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        if cache_x is not None or x.shape[2] != 1:
            return whole(self, x, cache_x)
        around = self._padding[2], self._padding[0]
        return functional.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], around).unsqueeze(2)

    QwenImageCausalConv3d.forward = flat
    try:
        yield
    finally:
        QwenImageCausalConv3d.forward = whole


def as_frames(images: ByteArray) -> Tensor:
    """Converts grey images uint8 [n, H, W] to float32 [n, 3, 1, H, W] in -1..1 with three equal channels."""
    grey = torch.from_numpy(images).float() / 127.5 - 1
    return grey[:, None, None].expand(-1, 3, -1, -1, -1)


def small_vae() -> Any:
    """Builds the VAE, with `initialise`d weights, in evaluation mode.

    It halves the image twice; Qwen-Image's own does so three times. A latent of 16 numbers thus describes 4 x 4 grey
    pixels. With three halvings it would describe 64, and lines one pixel wide stay blurred after minutes of training.
    """
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True]
    )
    initialise(vae)
    return vae.eval()


def initialise(vae: Any) -> None:
    """Sets convolution weights so that a single frame keeps its variance through the layers, and biases to zero.

    torch's own initialisation counts all time slices of a kernel, of which a single frame meets only the last. Each
    layer then passes on a third of its input, after seven layers only the biases are left, and hundreds of steps teach
    nothing.
    """
    with torch.no_grad():
        for name, module in vae.named_modules():
            if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
                last = module.weight[:, :, -1] if isinstance(module, torch.nn.Conv3d) else module.weight
                last.normal_(std=last[0].numel() ** -0.5 if not name.endswith("conv2") else 1e-3)
                if module.bias is not None:
                    module.bias.zero_()


def drawn_words(rng: random.Random, count: int) -> Tensor:
    """Returns drawings of random words of the pretraining, as `as_frames` does."""
    return as_frames(draw_many(rng.choices(pretraining_words(), k=count), rng))


def train_vae(
    vae: Any,
    steps: int,
    *,
    batch: int = 16,
    learning_rate: float = 6e-3,
    noise: float = 0.1,
    draw: Callable[[random.Random, int], Tensor] = drawn_words,
) -> None:
    """Trains the VAE in place for `steps` steps; the loss is the squared pixel error of the decoded image.

    `draw` returns so many images, float32 [n, 3, 1, H, W] in -1..1.

    Gaussian noise of std `noise` is added to the latents before decoding, and the loss has a small KL divergence to the
    unit Gaussian. The posterior's variance is fixed to `noise`^2, so the divergence is half the squared mean plus a
    constant. A learnt variance would return to 1 in the first hundred steps, and the latents would carry nothing.
    """
    rng = random.Random(1)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    vae.train()
    with single_frames():
        for step in range(steps):
            x = draw(rng, batch)
            mean = vae.encode(x).latent_dist.mean
            again = vae._decode(mean + noise * torch.randn_like(mean)).sample
            error = functional.mse_loss(again, x)
            optimizer.zero_grad(set_to_none=True)
            (error + _KL_WEIGHT * 0.5 * mean.square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 0 or step == steps - 1:
                log.info("vae %d/%d: error %.4f, latent std %.2f", step, steps, error.item(), mean.std().item())
    with torch.no_grad():
        vae.quant_conv.weight[vae.config.z_dim :] = 0.0
        vae.quant_conv.bias[vae.config.z_dim :] = 2 * math.log(noise)
    vae.eval()


@torch.no_grad()
def encode(vae: Any, images: ByteArray, chunk: int = 64) -> Tensor:
    """Returns posterior means of grey images uint8 [n, H, W], not normalised: float32 [n, 16, H/4, W/4]."""
    with single_frames():
        parts = [vae.encode(as_frames(images[i : i + chunk])).latent_dist.mode() for i in range(0, len(images), chunk)]
    return torch.cat(parts)[:, :, 0]


def normalise(vae: Any, latents: Tensor) -> Tensor:
    """Returns latents with mean 0 and std 1 per channel; the VAE's configuration stores both for the pipeline."""
    mean, std = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean[:, None, None]) / std[:, None, None]


@torch.no_grad()
def reconstruct(vae: Any, words: Sequence[str], seed: int) -> tuple[ByteArray, ByteArray]:
    """Draws words and passes them through the VAE; returns the drawings and the results, both uint8 [n, H, W, 3]."""
    images = draw_many(words, random.Random(seed))
    again = vae.decode(vae.encode(as_frames(images)).latent_dist.mode()).sample[:, :, 0]
    levels = ((again + 1) * 127.5).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return images[..., None].repeat(3, axis=-1), levels
