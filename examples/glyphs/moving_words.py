"""Pretraining of a small Wan 2.1 that makes videos of a word of three capitals that moves down, badly.

python -m examples.glyphs.moving_words
async-flowrl train --config-name one_step_off experiment=glyphs_motion
"""

import argparse
import logging
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.pipeline_family import quiet
from async_flowrl.policies.wan import WanPolicy, tiny_pipeline
from async_flowrl.rewards.image_statistics import motion
from async_flowrl.seeds import untouched_rng
from async_flowrl.types import ByteArray, Prompt, Sampling
from examples.glyphs.flow import legibility
from examples.glyphs.pretrain import save
from examples.glyphs.words import SIDE, TEST, WEIGHTS, pretraining_words, prompt

log = logging.getLogger("glyphs")

FRAMES = 5
STEPS = 12
"""Denoising steps per video, as in configs/experiment/glyphs_motion.yaml."""
MOVING_WEIGHTS = Path(__file__).parent / "moving_weights"
"""Folder of the pretrained model that runs begin with."""
_TEXT_TOKENS = 24
_SIZES = 12, 14
_PAPER, _INK = (150, 255), (0, 90)
_START, _SPEED = (-4, -2), (1.0, 1.75)
"""Rows from the middle in the first frame, and rows per frame."""
_NO_TEXT, _SHIFT = 0.1, 3.0
"""Share of steps with an empty prompt; shift of noise levels, as in the scheduler."""


def draw_video(word: str, rng: random.Random) -> ByteArray:
    """Draws a word that moves down at an even speed, in dark grey on light grey: uint8 [FRAMES, SIDE, SIDE]."""
    font = ImageFont.load_default(rng.randint(*_SIZES))
    paper, ink = rng.randint(*_PAPER), rng.randint(*_INK)
    x, y, speed = rng.randint(-1, 1), rng.randint(*_START), rng.uniform(*_SPEED)
    cell, frames = (SIDE - 2) / len(word), []
    for frame in range(FRAMES):
        image = Image.new("L", (SIDE, SIDE), paper)
        pen = ImageDraw.Draw(image)
        for i, letter in enumerate(word):
            place = 1 + x + cell * (i + 0.5), SIDE / 2 + round(y + speed * frame)
            pen.text(place, letter, font=font, fill=ink, anchor="mm")
        frames.append(np.asarray(image))
    return np.stack(frames)


def draw_videos(words: Sequence[str], rng: random.Random) -> ByteArray:
    return np.stack([draw_video(word, rng) for word in words])


def as_input(videos: ByteArray) -> Tensor:
    """Converts grey videos uint8 [n, F, H, W] to float32 [n, 3, F, H, W] in -1..1 with three equal channels."""
    grey = torch.from_numpy(videos).float() / 127.5 - 1
    return grey[:, None].expand(-1, 3, -1, -1, -1)


def moving_vae() -> Any:
    """Builds the VAE: that of the glyphs model, of the same architecture, with one latent for four frames more.

    Before the training a frame is coded as an image: kernels see the present frame alone, and of four frames the VAE
    keeps the last.
    """
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        scale_factor_spatial=4,
    )
    known = load_file(WEIGHTS / "vae" / "diffusion_pytorch_model.safetensors")
    missing, unexpected = vae.load_state_dict(known, strict=False)
    if unexpected or any("time_conv" not in name for name in missing):
        raise ValueError(f"the VAEs differ: {missing}, {unexpected}")
    with torch.no_grad():
        for name, module in vae.named_modules():
            if isinstance(module, torch.nn.Conv3d):
                module.weight[:, :, :-1].mul_(0.0 if module.weight.shape[2] == 3 else 1.0)
                if name.endswith("time_conv"):
                    outputs, inputs = module.weight.shape[:2]
                    module.weight[:, :, -1, 0, 0].copy_(torch.eye(inputs).repeat(outputs // inputs, 1))
                    module.bias.zero_()
                    module.weight.add_(0.02 * torch.randn_like(module.weight))
    return vae.eval()


def train_vae(vae: Any, steps: int, *, batch: int = 8, learning_rate: float = 4e-3, noise: float = 0.1) -> None:
    """Trains the VAE in place; the loss is that of `vae.train_vae`, of whole videos."""
    rng, words = random.Random(11), pretraining_words()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    vae.train()
    for step in range(steps):
        x = as_input(draw_videos(rng.choices(words, k=batch), rng))
        mean = vae.encode(x).latent_dist.mean
        error = functional.mse_loss(vae._decode(mean + noise * torch.randn_like(mean)).sample, x)
        optimizer.zero_grad(set_to_none=True)
        (error + 0.5e-4 * mean.square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            log.info("vae %d/%d: error %.4f, latent std %.2f", step, steps, error.item(), mean.std().item())
    vae.eval()


@torch.no_grad()
def latents_of(vae: Any, words: Sequence[str], copies: int) -> Tensor:
    """Returns latents [len(words), copies, 16, 2, 8, 8] of drawn videos, with mean 0 and std 1 per channel."""
    rng = random.Random(12)
    videos = draw_videos([word for word in words for _ in range(copies)], rng)
    parts = [vae.encode(as_input(videos[i : i + 64])).latent_dist.mode() for i in range(0, len(videos), 64)]
    x = torch.cat(parts)
    mean, std = x.mean((0, 2, 3, 4)), x.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    x = (x - mean[:, None, None, None]) / std[:, None, None, None]
    return x.view(len(words), copies, *x.shape[1:])


def embed(pipeline: Any, texts: Sequence[str]) -> Tensor:
    """Returns prompt embeddings [n, 24, D] like those of the pipeline's `encode_prompt`, but with gradients."""
    tokens = pipeline.tokenizer(list(texts), padding="max_length", max_length=_TEXT_TOKENS, return_tensors="pt")
    states = pipeline.text_encoder(tokens.input_ids, tokens.attention_mask).last_hidden_state
    return torch.as_tensor(states * tokens.attention_mask[:, :, None])


def look_at_neighbours(text_encoder: Any) -> None:
    """Makes each head of the untrained text encoder look at one neighbour of a token, so that places are known."""
    with torch.no_grad():
        for block, offsets in zip(text_encoder.encoder.block, ((-1, -2), (-1, 1)), strict=True):
            attention = block.layer[0].SelfAttention
            for head, offset in enumerate(offsets):
                bucket = attention._relative_position_bucket(torch.tensor(offset))
                attention.relative_attention_bias.weight[bucket, head] = 5.0


def train_flow(pipeline: Any, steps: int, *, copies: int = 4, batch: int = 48) -> None:
    """Trains the transformer and the text encoder by flow matching, as `flow.train_flow` does."""
    words, began = pretraining_words(), time.monotonic()
    latents, rng = latents_of(pipeline.vae, words, copies), torch.Generator().manual_seed(13)
    look_at_neighbours(pipeline.text_encoder)
    parameters = [*pipeline.transformer.train().parameters(), *pipeline.text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for step in range(steps):
        row = torch.randint(len(words), (batch,), generator=rng)
        x = latents[row, torch.randint(copies, (batch,), generator=rng)]
        blank = torch.rand((), generator=rng).item() < _NO_TEXT
        text = (
            embed(pipeline, [""]).expand(batch, -1, -1) if blank else embed(pipeline, [prompt(words[i]) for i in row])
        )
        noise, even = torch.randn(x.shape, generator=rng), torch.rand(batch, generator=rng)
        sigma = _SHIFT * even / (1 + (_SHIFT - 1) * even)
        mixed = torch.lerp(x, noise, sigma[:, None, None, None, None])
        (velocity,) = pipeline.transformer(mixed, 1000 * sigma, text, return_dict=False)
        loss = functional.mse_loss(velocity, noise - x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log.info("flow %d/%d: loss %.4f, %.0f s", step, steps, loss.item(), time.monotonic() - began)
        if step % 200 == 199:
            report(pipeline, copies=1)
            pipeline.transformer.train()


@torch.no_grad()
def generate(pipeline: Any, words: Sequence[str], copies: int, *, guidance: float = 1.0) -> ByteArray:
    """Generates `copies` videos per word by the Euler ODE: uint8 [len(words), copies, FRAMES, SIDE, SIDE, 3]."""
    policy = WanPolicy(
        pipeline.transformer.eval(),
        pipeline.scheduler,
        side=8,
        dtype=torch.float32,
        pipeline=pipeline,
        max_sequence_length=_TEXT_TOKENS,
    )
    size = FRAMES, SIDE, SIDE
    sampling = Sampling(size, STEPS, guidance, 0.0, "", "ode", 0.0)
    sigmas, rng = policy.sigmas(STEPS, size), torch.Generator().manual_seed(14)
    texts = policy.encode([*(prompt(word) for word in words), ""])
    *positives, negative = [{"prompt_embeds": torch.from_numpy(text["prompt_embeds"])} for text in texts]
    videos = []
    for positive in positives:
        x = torch.randn((copies, *policy.latent_shape(size)), generator=rng)
        for now, after in pairwise(sigmas):
            x = x + (after - now) * policy.velocity(x, now.expand(copies), positive, negative, sampling)
        videos.append(policy.decode(x, size).numpy())
    return np.stack(videos)


def report(pipeline: Any, *, copies: int, picture: Path | None = None) -> None:
    """Logs OCR of every frame, and motion, of held-out words: drawn, through the VAE, and generated."""
    drawn = draw_videos(TEST, random.Random(15))
    again = pipeline.vae.decode(pipeline.vae.encode(as_input(drawn)).latent_dist.mode()).sample
    levels = ((again.detach() + 1) * 127.5).round().clamp(0, 255).byte().movedim(1, -1).numpy()
    kinds = {"drawn": drawn[..., None].repeat(3, axis=-1)[:, None], "through the VAE": levels[:, None]}
    kinds |= {"generated": generate(pipeline, TEST, copies)}
    if picture is not None:  # At the end of the training.
        kinds |= {"generated, guidance 3": generate(pipeline, TEST, copies, guidance=3.0)}
    for name, videos in kinds.items():
        frames = videos.reshape(len(TEST), -1, SIDE, SIDE, 3)
        moved = np.mean(motion(videos.reshape(-1, FRAMES, SIDE, SIDE, 3), Prompt(0, "")))
        log.info("held-out words, %s: OCR %.3f, motion %.3f", name, legibility(frames, TEST), moved)
    if picture is not None:
        rows = [np.concatenate(list(video), axis=1) for video in kinds["generated"][:, 0]]
        grid = np.concatenate(rows)
        Image.fromarray(grid).resize((grid.shape[1] * 3, grid.shape[0] * 3), Image.Resampling.NEAREST).save(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MOVING_WEIGHTS, help="diffusers folder to write")
    parser.add_argument("--picture", type=Path, default=Path("moving_words.png"), help="picture of videos to write")
    parser.add_argument("--vae-steps", type=int, default=800)
    parser.add_argument("--flow-steps", type=int, default=600)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    with untouched_rng(0), quiet():
        vae = moving_vae()
        with torch.random.fork_rng():
            train_vae(vae, arguments.vae_steps)
        pipeline = tiny_pipeline(TinyConfig(family="wan", layers=2, heads=8, contrast=1.0))
        pipeline.register_modules(vae=vae)
        train_flow(pipeline, arguments.flow_steps)
    save(pipeline, arguments.out)
    report(pipeline, copies=4, picture=arguments.picture)


if __name__ == "__main__":
    main()
