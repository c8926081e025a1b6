"""Inputs of the comparison of rewards with upstream code: tiny CLIP weights, a tiny vocabulary, images and prompts.

They are drawn by NumPy's RandomState, whose numbers never change between versions, so they need not be stored.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH, LAYERS, HEADS, EMBED, PATCH, SIDE, TOKENS = 128, 2, 2, 32, 8, 32, 77
"""Sizes of both CLIP towers; OpenAI's code uses one attention head per 64 numbers. Images have SIDE pixels per side."""
MERGES = (
    *("t h", "th e</w>", "i n", "e r", "a n", "r e", "o n", "s t", "e n", "in g</w>", "a t", "e d</w>"),
    *("r ed</w>", "f o", "fo x</w>", "o r", "an d</w>", "1 0", "c a", "ca f"),
)
PROMPTS = (
    "a red fox and the café",
    "A  Red\tFOX, it's 10 o'clock & more…",
    "“Grand opening” &amp; sale — the sign’s text",
    "schÃ¶n 狐 🦊 ﬁre",
    "in the end, " * 30,
)
"""Prompts with plain words, capitals and blanks, characters that ftfy and HTML unescaping change, broken UTF-8, and one
longer than 77 tokens."""

Array = npt.NDArray[np.float32]


def images(height: int, width: int, count: int = 4) -> npt.NDArray[np.uint8]:
    """Returns images uint8 [count, height, width, 3]: smooth waves, each of another frequency, with noise."""
    random = np.random.RandomState(height if height == width else 1000 * height + width)
    rows, columns = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    waves = [
        np.stack([np.sin(2 * np.pi * ((n + 1) * rows + channel * columns)) for channel in range(3)], axis=-1)
        for n in range(count)
    ]
    return np.clip(127 + 90 * np.stack(waves) + 25 * random.standard_normal((count, height, width, 3)), 0, 255).astype(
        np.uint8
    )


def vocabulary() -> list[str]:
    """Returns the entries in the order of their ids, as OpenAI's tokenizer derives them from the merges."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + place) for place in range(len(hidden))]
    merged = ["".join(merge.split()) for merge in MERGES]
    return [*letters, *(f"{letter}</w>" for letter in letters), *merged, "<|startoftext|>", "<|endoftext|>"]


def clip_weights(seed: int) -> dict[str, Array]:
    """Returns the weights of a CLIP model with both towers, under OpenAI's and open_clip's names."""
    random = np.random.RandomState(seed)
    return {name: _drawn(random, name, shape) for name, shape in _shapes()}


def head_weights(seed: int) -> dict[str, Array]:
    """Returns the weights of an aesthetic head of the published shape, except that its input has EMBED numbers."""
    random, widths = np.random.RandomState(seed), (EMBED, 1024, 128, 64, 16, 1)
    state: dict[str, Array] = {}
    for place, rows, columns in zip((0, 2, 4, 6, 7), widths[1:], widths[:-1], strict=True):
        state[f"layers.{place}.weight"] = (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        state[f"layers.{place}.bias"] = (0.1 * random.standard_normal(rows)).astype(np.float32)
    return state


def clip_config(activation: str) -> Mapping[str, Any]:
    """Returns the keyword arguments of transformers' CLIPConfig."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": activation,
        "projection_dim": EMBED,
    }
    entries = vocabulary()
    ids = {"bos_token_id": len(entries) - 2, "eos_token_id": len(entries) - 1, "pad_token_id": len(entries) - 1}
    return {
        "text_config": {**tower, "vocab_size": len(entries), "max_position_embeddings": TOKENS, **ids},
        "vision_config": {**tower, "image_size": SIDE, "patch_size": PATCH},
        "projection_dim": EMBED,
    }


def _drawn(random: np.random.RandomState, name: str, shape: tuple[int, ...]) -> Array:
    if name == "logit_scale":
        return np.array(np.log(100.0), dtype=np.float32)
    noise = random.standard_normal(shape)
    if name.rpartition(".")[0].endswith(("ln_1", "ln_2", "ln_pre", "ln_post", "ln_final")):
        noise = 0.1 * noise + name.endswith("weight")
    elif name.endswith("bias"):
        noise = 0.1 * noise
    elif len(shape) > 1 and "embedding" not in name:
        noise = noise / np.prod(shape[1:]) ** 0.5
    return noise.astype(np.float32)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "logit_scale", ()
    yield "positional_embedding", (TOKENS, WIDTH)
    yield "text_projection", (WIDTH, EMBED)
    yield "token_embedding.weight", (len(vocabulary()), WIDTH)
    yield from _norm("ln_final")
    yield "visual.class_embedding", (WIDTH,)
    yield "visual.positional_embedding", ((SIDE // PATCH) ** 2 + 1, WIDTH)
    yield "visual.proj", (WIDTH, EMBED)
    yield "visual.conv1.weight", (WIDTH, 3, PATCH, PATCH)
    yield from (*_norm("visual.ln_pre"), *_norm("visual.ln_post"))
    for tower in ("transformer", "visual.transformer"):
        for layer in range(LAYERS):
            block = f"{tower}.resblocks.{layer}"
            yield from (*_norm(f"{block}.ln_1"), *_norm(f"{block}.ln_2"))
            for matrix, rows, columns in (
                ("attn.in_proj_", 3 * WIDTH, WIDTH),
                ("attn.out_proj.", WIDTH, WIDTH),
                ("mlp.c_fc.", 4 * WIDTH, WIDTH),
                ("mlp.c_proj.", WIDTH, 4 * WIDTH),
            ):
                yield f"{block}.{matrix}weight", (rows, columns)
                yield f"{block}.{matrix}bias", (rows,)


def _norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (WIDTH,)
    yield f"{name}.bias", (WIDTH,)
