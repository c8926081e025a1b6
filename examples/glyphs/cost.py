"""Cost of the parts of a training step of glyphs, in milliseconds per 48 images, for two sets of LoRA layers.

python -m examples.glyphs.cost

Every number is the smallest processor time of several repeats on one thread; other work on the machine hardly changes
it.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor

from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rewards.ocr import OCR
from examples.glyphs.audit import open_model
from examples.glyphs.flow import READER, TOKEN_SIDE
from examples.glyphs.words import SIDE, prompt

ROWS = 48
"""Images per training step of experiment=glyphs."""
ATTENTION = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
LAYERS: dict[str, Any] = {"all layers": "all-linear", "the attention": ATTENTION}


def main() -> None:
    torch.set_num_threads(1)
    print(f"| milliseconds per {ROWS} images | {' | '.join(LAYERS)} |\n|---|---|---|")
    passes = [network_times(targets) for targets in LAYERS.values()]
    print(f"| one sampling step | {' | '.join(f'{forward:.0f}' for forward, _ in passes)} |")
    print(f"| one trained level: old policy, then trained one | {' | '.join(f'{both:.0f}' for _, both in passes)} |")
    for name, value in after_sampling().items():
        print(f"| {name} | {value:.0f} | {value:.0f} |")


def network_times(targets: Any, repeats: int = 6) -> tuple[float, float]:
    """Measures the transformer on `ROWS` images with a LoRA on the layers `targets`, in milliseconds of processor time.

    Returns the time of one forward pass, and the time of what DiffusionNFT does at one noise level: a forward pass of
    the old policy, then a forward and a backward pass of the trained one.
    """
    policy = open_policy()
    transformer = policy.transformer
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    latents, level = torch.randn(ROWS, *policy.latent_shape(SIDE)), torch.full((ROWS,), 0.8)
    text = torch.from_numpy(policy.encode([prompt("CAT")])[0]["prompt_embeds"]).expand(ROWS, -1, -1)

    def velocity() -> Tensor:
        side = SIDE // TOKEN_SIDE
        out = transformer(latents, text, None, level, [[(1, side, side)]] * ROWS, return_dict=False)[0]
        return torch.as_tensor(out)

    def update() -> None:
        torch.autograd.grad(velocity().square().mean(), trained, allow_unused=True)

    with torch.no_grad():
        forward = milliseconds(velocity, repeats)
    return forward, forward + milliseconds(update, repeats)


def after_sampling(repeats: int = 6) -> dict[str, float]:
    """Returns the milliseconds of VAE decoding and of OCR ("reading") per `ROWS` images, scaled up from 12."""
    policy, reader = open_policy(), OCR(**READER)
    latents = torch.randn(12, *policy.latent_shape(SIDE))
    with torch.no_grad():
        images = policy.decode(latents, SIDE).numpy()
        decoded = milliseconds(lambda: policy.decode(latents, SIDE), repeats)
    read = milliseconds(lambda: [reader.read(image) for image in images], repeats)
    return {"decoding": decoded * ROWS / 12, "reading": read * ROWS / 12}


def open_policy() -> QwenImagePolicy:
    pipeline = open_model()
    return QwenImagePolicy(
        pipeline.transformer, pipeline.scheduler, side=TOKEN_SIDE, dtype=torch.float32, pipeline=pipeline
    )


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """Returns the smallest processor time of `repeats` calls, after one warm-up call."""
    work()
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return 1000 * min(spent)


if __name__ == "__main__":
    main()
