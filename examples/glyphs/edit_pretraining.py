"""Pretraining of a small Qwen-Image-Edit that puts a word into a picture, badly.

python -m examples.glyphs.edit_pretraining
async-flowrl train --config-name one_step_off experiment=glyphs_edit
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
from PIL import Image
from torch import Tensor
from torch.nn import functional

from async_flowrl.config.schema import DataConfig, TinyConfig
from async_flowrl.data.load import load_data
from async_flowrl.image_file import opened
from async_flowrl.policies.pipeline_family import quiet
from async_flowrl.policies.qwen_image_edit import QwenImageEditPolicy, tiny_pipeline
from async_flowrl.rewards.image_statistics import EditConsistency
from async_flowrl.seeds import untouched_rng
from async_flowrl.types import ByteArray, FloatArray, Prompt, Sampling
from examples.glyphs.edited_words import EditedWord, Look, draw_picture, edits, look, prompt
from examples.glyphs.pretrain import save
from examples.glyphs.vae import initialise, single_frames, train_vae
from examples.glyphs.words import SIDE, pretraining_words

log = logging.getLogger("glyphs")

EDIT_WEIGHTS = Path(__file__).parent / "edit_weights"
"""Folder of the pretrained model that runs begin with."""
BLOCK = 16
"""Side of the square of equal pixels that stands for a pixel of a picture: images have 512 × 512 pixels."""
STEPS = 6
"""Denoising steps per image, as in configs/experiment/glyphs_edit.yaml."""
_SEEN = 1024 // BLOCK
"""Side of a source for the network, in such squares: Qwen-Image-Edit enlarges each to an area of 1024 × 1024 pixels."""
_TEXT_SIDE = 56
"""Side of a source for the text encoder, in pixels: it has four tokens."""


def as_input(pictures: FloatArray) -> Tensor:
    """Converts pictures [n, H, W, 3] of 0..255 to float32 [n, 3, 1, H, W] in -1..1."""
    return (torch.from_numpy(pictures).float() / 127.5 - 1).permute(0, 3, 1, 2).unsqueeze(2)


def small_vae() -> Any:
    """Builds the VAE of pictures without blocks; a latent stands for 4 × 4 of their pixels."""
    from diffusers import AutoencoderKLQwenImage

    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 3], num_res_blocks=1, temperal_downsample=[False, False]
    )
    initialise(vae)
    return vae.eval()


def pictures(chosen: Sequence[tuple[str, Look]]) -> FloatArray:
    return np.stack([draw_picture(*each) for each in chosen]).astype(np.float32)


def drawn(rng: random.Random, count: int) -> Tensor:
    words = rng.choices(pretraining_words(), k=count)
    return as_input(pictures([(word, look(rng)) for word in words]))


def of_blocks(vae: Any) -> Any:
    """Returns the VAE of images whose every block of BLOCK × BLOCK pixels is a pixel of the given VAE's images.

    Its class is that of Wan, the same network, which can take blocks as pixels: Qwen-Image-Edit encodes a source at
    1024 × 1024 pixels, which would otherwise be 16,384 tokens for this network.
    """
    from diffusers import AutoencoderKLWan

    kept = {name: vae.config[name] for name in ("base_dim", "z_dim", "dim_mult", "num_res_blocks")}
    kept |= {name: vae.config[name] for name in ("latents_mean", "latents_std")}
    channels, stages = 3 * BLOCK**2, [False] * (len(kept["dim_mult"]) - 1 + BLOCK.bit_length() - 1)
    blocks = AutoencoderKLWan(
        **kept,
        temperal_downsample=stages,
        in_channels=channels,
        out_channels=channels,
        patch_size=BLOCK,
        scale_factor_spatial=2 ** len(stages),
    )
    state = vae.state_dict()
    # A color's channels are neighbours. A block is read by its mean.
    first, last = "encoder.conv_in.weight", "decoder.conv_out"
    state[first] = state[first].repeat_interleave(BLOCK**2, dim=1) / BLOCK**2
    for name in (f"{last}.weight", f"{last}.bias"):
        state[name] = state[name].repeat_interleave(BLOCK**2, dim=0)
    blocks.load_state_dict(state)
    return blocks.eval()


def seen_by_network(pictures: FloatArray) -> FloatArray:
    """Returns sources [n, 32, 32, 3] as the network's VAE gets them, as the means of blocks: [n, 64, 64, 3].

    Pillow enlarges them; only its rounding, and its bounds at 0 and 255, are missing here.
    """
    one = Image.fromarray(np.eye(SIDE, dtype=np.float32)).resize((SIDE, 1024), Image.Resampling.LANCZOS)
    mean = np.asarray(one).reshape(_SEEN, BLOCK, SIDE).mean(1)
    return np.einsum("yh,xw,nhwc->nyxc", mean, mean, pictures, optimize=True).clip(0, 255)


@torch.no_grad()
def latents_of(vae: Any, pictures: FloatArray, chunk: int = 64) -> Tensor:
    """Returns latents [n, 16, h, w] of pictures [n, H, W, 3], as the VAE gives them."""
    with single_frames():
        parts = [vae.encode(as_input(pictures[i : i + chunk])) for i in range(0, len(pictures), chunk)]
    return torch.cat([part.latent_dist.mode()[:, :, 0] for part in parts])


def packed(latents: Tensor) -> Tensor:
    """Returns tokens [n, h * w / 4, 64] of latents [n, 16, h, w], in the order of QwenImagePipeline."""
    n, channels, height, width = latents.shape
    squares = latents.view(n, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(n, height * width // 4, channels * 4).contiguous()


def small_pipeline(vae: Any) -> Any:
    """Builds the pipeline with the trained VAE and a network and text encoder with random weights."""
    pipeline = tiny_pipeline(TinyConfig(family="qwen_image_edit", layers=2, heads=8, contrast=1.0))
    # The longest edge is an area, too; the side is rounded down.
    pipeline.processor.image_processor.size = {"shortest_edge": _TEXT_SIDE**2, "longest_edge": (_TEXT_SIDE + 1) ** 2}
    return type(pipeline)(**{**pipeline.components, "vae": vae})


def shown_to_text_encoder(pipeline: Any, sources: ByteArray) -> Tensor:
    """Returns sources uint8 [n, 32, 32, 3] as the processor of the text encoder gives them: [n, patches, values]."""
    shown = [Image.fromarray(source).resize((384, 384), Image.Resampling.LANCZOS) for source in sources]
    pixels: Tensor = pipeline.processor.image_processor(shown, return_tensors="pt").pixel_values
    return pixels.view(len(sources), -1, pixels.shape[-1])


def embed(pipeline: Any, texts: Sequence[str], seen: Tensor) -> Tensor:
    """Returns embeddings [n, L, D] of texts, like those of the pipeline, but with gradients.

    `seen` has the source of each, as `shown_to_text_encoder` gives it.
    """
    side = _TEXT_SIDE // 14
    place = "Picture 1: <|vision_start|>" + "<|image_pad|>" * (side // 2) ** 2 + "<|vision_end|>"
    written = [pipeline.prompt_template_encode.format(place + text) for text in texts]
    ids = torch.tensor(pipeline.tokenizer(written).input_ids)
    states: Tensor = pipeline.text_encoder(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=seen.flatten(0, 1),
        image_grid_thw=torch.tensor([[1, side, side]] * len(texts)),
        output_hidden_states=True,
    ).hidden_states[-1]
    return states[:, pipeline.prompt_template_encode_start_idx :]


def train_flow(pipeline: Any, vae: Any, steps: int, words: Sequence[str], *, copies: int = 2, batch: int = 48) -> None:
    """Trains the transformer and the text encoder by flow matching, as `flow.train_flow` does.

    `vae` is the VAE without blocks. Stores mean and std of the latents in the configurations of both VAEs.
    """
    rng, began = random.Random(32), time.monotonic()
    chosen = edits(words, copies, rng)
    before = pictures([(word, seen) for _, word, seen in chosen])
    after = latents_of(vae, pictures([(word, seen) for word, _, seen in chosen]))
    mean, std = after.mean((0, 2, 3)), after.std((0, 2, 3))
    for each in (vae, pipeline.vae):
        each.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    both = after, latents_of(vae, seen_by_network(before))
    targets, sources = (packed((x - mean[:, None, None]) / std[:, None, None]) for x in both)
    seen = shown_to_text_encoder(pipeline, before.astype(np.uint8))
    log.info("%d edits are encoded, %.0f s", len(chosen), time.monotonic() - began)
    grids = [(1, *[SIDE // 8] * 2), (1, *[_SEEN // 8] * 2)]
    draws = torch.Generator().manual_seed(33)
    parameters = [*pipeline.transformer.train().parameters(), *pipeline.text_encoder.model.language_model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for step in range(steps):
        rows = torch.randint(len(chosen), (batch,), generator=draws)
        text = embed(pipeline, [prompt(chosen[row][0]) for row in rows], seen[rows])
        x, noise = targets[rows], torch.randn((batch, *targets.shape[1:]), generator=draws)
        sigma = torch.rand(batch, generator=draws)
        mixed = torch.lerp(x, noise, sigma[:, None, None])
        (out,) = pipeline.transformer(
            hidden_states=torch.cat([mixed, sources[rows]], dim=1),
            timestep=sigma,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=None,
            img_shapes=[grids],
            return_dict=False,
        )
        loss = functional.mse_loss(out[:, : x.shape[1]], noise - x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            log.info("flow %d/%d: loss %.4f, %.0f s", step, steps, loss.item(), time.monotonic() - began)
    pipeline.transformer.eval()


def edit_policy(pipeline: Any) -> QwenImageEditPolicy:
    return QwenImageEditPolicy(
        pipeline.transformer.eval(), pipeline.scheduler, side=8 * BLOCK, dtype=torch.float32, pipeline=pipeline
    )


@torch.no_grad()
def generate(pipeline: Any, asked: Sequence[Prompt], copies: int) -> ByteArray:
    """Generates `copies` edits per prompt by the Euler ODE: uint8 [len(asked), copies, 512, 512, 3]."""
    policy, size = edit_policy(pipeline), SIDE * BLOCK
    sampling = Sampling(size, STEPS, 1.0, 0.0, "", "ode", 0.0)
    sigmas, rng, images = policy.sigmas(STEPS, size), torch.Generator().manual_seed(34), []
    for row in asked:
        (arrays,) = policy.encode([row.wording])
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        x = torch.randn((copies, *policy.latent_shape(size)), generator=rng)
        for now, after in pairwise(sigmas):
            x = x + (after - now) * policy.velocity(x, now.expand(copies), given, None, sampling)
        images.append(policy.decode(x, size).numpy())
    return np.stack(images)


def report(pipeline: Any, copies: int, picture: Path) -> None:
    """Logs scores of held-out words, and draws sources above their edits."""
    data = DataConfig(train="prompts/glyphs_edit_train.jsonl", evaluation="prompts/glyphs_edit_test.jsonl")
    asked = load_data(data, needs_target=True).evaluation[:32]
    sources = [np.asarray(opened(row.images[0])) for row in asked]
    images, word, kept = generate(pipeline, asked, copies), EditedWord(detect=False, line_width=96), EditConsistency()
    groups = list(zip(images, asked, sources, strict=True))
    read = [word(group, row) for group, row, _ in groups]
    same = [kept(group, row, [source]) for group, row, source in groups]
    log.info("held-out words: OCR %.3f, consistency %.3f", np.mean(read), np.mean(same))
    columns = [np.concatenate([source, *group[:, ::BLOCK, ::BLOCK]]) for group, _, source in groups]
    grid = np.concatenate(columns, axis=1).repeat(2, axis=0).repeat(2, axis=1)
    Image.fromarray(grid).save(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=EDIT_WEIGHTS, help="diffusers folder to write")
    parser.add_argument("--picture", type=Path, default=Path("edited_words.png"), help="picture of edits to write")
    parser.add_argument("--vae-steps", type=int, default=800)
    parser.add_argument("--flow-steps", type=int, default=600)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    with untouched_rng(0), quiet():
        vae = small_vae()
        train_vae(vae, arguments.vae_steps, draw=drawn)
    with untouched_rng(0), quiet():
        pipeline = small_pipeline(of_blocks(vae))
        train_flow(pipeline, vae, arguments.flow_steps, pretraining_words())
    pipeline.vae.half()  # Half the bytes in the repository.
    save(pipeline, arguments.out)
    pipeline.vae.float()
    report(pipeline, 4, arguments.picture)


if __name__ == "__main__":
    main()
