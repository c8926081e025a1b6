"""Pretraining of the glyphs model by flow matching on the VAE's latents, image generation, and the OCR score.

pretrain.py calls `train_flow`; audit.py and other modules call `generate` and `legibility`.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rewards.ocr import OCR, text_score
from async_flowrl.types import ByteArray, Sampling
from examples.glyphs.vae import encode, normalise
from examples.glyphs.words import SIDE, draw_many, pretraining_words, prompt

READER: dict[str, Any] = {"detect": False, "line_width": 48}
"""Options of the OCR model that is the reward, as in configs/reward/ocr_word.yaml: the image is read as one line."""
DETECTING_READER: dict[str, Any] = {"enlarge": 2, "line_width": 128}
"""Options of a second OCR reader, which first looks for a line of text. No run is trained on it."""

STEPS = 12
"""Denoising steps per image, as in configs/experiment/glyphs.yaml."""

log = logging.getLogger(__name__)

TOKEN_SIDE = 8
"""Side of a transformer token in pixels: a token is 2 x 2 latents, and each latent covers 4 x 4 pixels."""

_NO_TEXT = 0.1
"""Share of the training steps with an empty prompt; classifier-free guidance needs them."""


def latents_of(vae: Any, words: Sequence[str], copies: int) -> Tensor:
    """Draws each word `copies` times and returns packed, normalised latents float32 [len(words), copies, tokens, 64].

    Also stores the latents' mean and std in the VAE's configuration (`normalise`).
    """
    rng = random.Random(2)
    drawn = draw_many([word for word in words for _ in range(copies)], rng)
    x = normalise(vae, encode(vae, drawn))
    n, channels, height, width = x.shape
    packed = x.view(n, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return packed.reshape(len(words), copies, height * width // 4, channels * 4).contiguous()


def prompt_ids(pipeline: Any, texts: Sequence[str]) -> Tensor:
    """Returns token ids [n, L] of the texts inside the pipeline's prompt template; all must have the same length L."""
    template = pipeline.prompt_template_encode
    return torch.tensor(pipeline.tokenizer([template.format(text) for text in texts]).input_ids)


def embed(pipeline: Any, ids: Tensor) -> Tensor:
    """Returns prompt embeddings [n, L - prefix, D] like those of the pipeline's `encode_prompt`, but with gradients."""
    states: Tensor = pipeline.text_encoder.model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    return states[:, pipeline.prompt_template_encode_start_idx :]


def train_flow(
    pipeline: Any,
    steps: int,
    *,
    copies: int = 12,
    batch: int = 48,
    learning_rate: float = 2e-3,
    watch: Callable[[int], None] | None = None,
) -> None:
    """Trains the transformer and the text encoder for `steps` steps by flow matching.

    The loss is the squared error of the velocity (noise - latents) at noise levels uniform in 0..1. Each step draws
    `batch` random words. The learning rate is constant after a warm-up, so a shorter run is the beginning of a longer
    one. `watch(step)` is called after steps 0, 100, 200, … and the last one, counted from 0.
    """
    words = pretraining_words()
    latents = latents_of(pipeline.vae, words, copies)
    ids, nothing = prompt_ids(pipeline, [prompt(word) for word in words]), prompt_ids(pipeline, [" "])
    transformer, rng = pipeline.transformer.train(), torch.Generator().manual_seed(3)
    parameters = [*transformer.parameters(), *pipeline.text_encoder.model.language_model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    for step in range(steps):
        row = torch.randint(len(words), (batch,), generator=rng)
        x = latents[row, torch.randint(copies, (batch,), generator=rng)]
        blank = torch.rand((), generator=rng).item() < _NO_TEXT
        text = embed(pipeline, nothing).expand(batch, -1, -1) if blank else embed(pipeline, ids[row])
        noise = torch.randn(x.shape, generator=rng)
        sigma = torch.rand(batch, generator=rng)
        mixed = torch.lerp(x, noise, sigma[:, None, None])
        loss = functional.mse_loss(_velocity(transformer, mixed, sigma, text), noise - x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            log.info("flow %d/%d: loss %.4f", step, steps, loss.item())
            if watch is not None:
                watch(step)
    transformer.eval()


def _velocity(transformer: Any, latents: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
    side = SIDE // TOKEN_SIDE
    out: Any = transformer(
        hidden_states=latents,
        timestep=sigma,
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, side, side)]] * len(latents),
        return_dict=False,
    )[0]
    return torch.as_tensor(out)


@torch.no_grad()
def generate(
    pipeline: Any, words: Sequence[str], copies: int, *, steps: int, guidance: float = 1.0, form: str = "{}"
) -> ByteArray:
    """Generates `copies` images per word: uint8 [len(words), copies, H, W, 3]; `form` takes a word's prompt.

    The sampler is the deterministic Euler ODE in `steps` steps, from the same initial noises in every call. `guidance`
    is the scale of classifier-free guidance; 1 means none.
    """
    policy = QwenImagePolicy(
        pipeline.transformer, pipeline.scheduler, side=TOKEN_SIDE, dtype=torch.float32, pipeline=pipeline
    )
    sampling = Sampling(SIDE, steps, guidance, 0.0, " ", "ode", 0.0)
    sigmas, rng = policy.sigmas(steps, SIDE), torch.Generator().manual_seed(4)
    texts = policy.encode([*(form.format(prompt(word)) for word in words), " "])
    *positives, negative = [{"prompt_embeds": torch.from_numpy(text["prompt_embeds"])} for text in texts]
    images = []
    for positive in positives:
        x = torch.randn((copies, *policy.latent_shape(SIDE)), generator=rng)
        for now, after in pairwise(sigmas):
            x = x + (after - now) * policy.velocity(x, now.expand(copies), positive, negative, sampling)
        images.append(policy.decode(x, SIDE).numpy())
    return np.stack(images)


def legibility(images: ByteArray, words: Sequence[str], reader: Mapping[str, Any] = READER) -> float:
    """Returns the mean OCR score (`text_score`, 0..1) of images uint8 [len(words), copies, H, W, 3].

    `reader` holds the options of `OCR`.
    """
    ocr = OCR(**reader)
    pairs = [(image, word) for word, group in zip(words, images, strict=True) for image in group]
    return float(np.mean([text_score(ocr.read(image), word) for image, word in pairs]))
