"""Measurement of trained weights on the held-out words: the trained OCR score and scores that were not trained.

python -m examples.glyphs.audit outputs/glyphs/lora

Prints a Markdown table: drawn words, the base model, and each given LoRA or whole transformer. Held-out words (`TEST`)
are those that no training has seen. compare.py and league.py in this folder use `scores` for their results.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from async_flowrl.config.schema import ModelConfig
from async_flowrl.observability.statistics import diversity
from async_flowrl.policies.registry import load_pipeline, resolve_model
from async_flowrl.types import ByteArray, FloatArray
from examples.glyphs.flow import DETECTING_READER, STEPS, generate, legibility
from examples.glyphs.words import LETTERS, SIDE, TEST, WEIGHTS, draw_many

COPIES = 8
"""Images per word if --copies is not given."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path, nargs="*", help="lora/ or transformer/ folders of finished runs")
    parser.add_argument("--model", default=str(WEIGHTS))
    parser.add_argument("--copies", type=int, default=COPIES, help="images per word")
    parser.add_argument("--picture", type=Path, help="before (above) and after (below), two images per word")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pipeline = open_model(arguments.model)
    print("| | OCR | other reader | wrong word | letters by template | sharpness | variety | contrast |")
    print("|---|---|---|---|---|---|---|---|")
    drawn = [draw_many([word] * arguments.copies, random.Random(number)) for number, word in enumerate(TEST)]
    print(row("drawn words", np.stack(drawn)[..., None].repeat(3, axis=-1)), flush=True)
    rows = []
    for name, steps, guidance in (("base", STEPS, 1.0), ("base, 40 steps", 40, 1.0), ("base, guidance 3", STEPS, 3.0)):
        rows.append(generate(pipeline, TEST, arguments.copies, steps=steps, guidance=guidance))
        print(row(name, rows[-1]), flush=True)
    after = rows[0]
    for folder in arguments.trained:
        after = trained_images(pipeline, folder, arguments.copies)
        print(row(str(folder), after), flush=True)
    if arguments.picture is not None:
        Image.fromarray(before_after(rows[0], after)).save(arguments.picture)


def open_model(path: str = str(WEIGHTS)) -> Any:
    """Loads a glyphs model as a diffusers pipeline, float32 on the CPU."""
    return load_pipeline(resolve_model(ModelConfig(path=path)), dtype="float32", device="cpu")


def trained_images(pipeline: Any, trained: Path, copies: int, steps: int = STEPS) -> ByteArray:
    """Generates uint8 [len(TEST), copies, H, W, 3] of the held-out words with weights that a run trained.

    `trained` is the run's folder of a LoRA, or of a whole transformer (`tune=full`). The pipeline has its own weights
    again afterwards.
    """
    if (trained / "config.json").is_file():
        whole = type(pipeline.transformer).from_pretrained(trained)
        return generate(type(pipeline)(**pipeline.components | {"transformer": whole}), TEST, copies, steps=steps)
    pipeline.load_lora_weights(trained, adapter_name="trained")
    try:
        return generate(pipeline, TEST, copies, steps=steps)
    finally:
        pipeline.unload_lora_weights()


def scores(images: ByteArray) -> dict[str, float]:
    """Measures images uint8 [len(TEST), copies, H, W, 3] of the held-out words; every score is a mean.

    `ocr`: score of the reader, the OCR model that is trained on. `other_reader`: the same with other OCR options.
    `wrong_word`: the reader's score against another word than the asked one. `templates`: `template_accuracy`.
    `sharpness`, `variety` and `contrast` describe the look of the images.
    """
    return {
        "ocr": legibility(images, TEST),
        "other_reader": legibility(images, TEST, DETECTING_READER),
        "wrong_word": legibility(images, TEST[5:] + TEST[:5]),
        "templates": template_accuracy(images, TEST),
        "sharpness": sharpness(images),
        "variety": variety(images),
        "contrast": contrast(images),
    }


def row(name: str, images: ByteArray) -> str:
    """Returns one line of the table that `main` prints."""
    return f"| {name} | " + " | ".join(f"{value:.3f}" for value in scores(images).values()) + " |"


def sharpness(images: ByteArray) -> float:
    """Returns the mean absolute difference of horizontal neighbours plus that of vertical ones, with greys in 0..1."""
    grey = images.astype(np.float32).mean(-1) / 255
    return float(np.abs(np.diff(grey, axis=-1)).mean() + np.abs(np.diff(grey, axis=-2)).mean())


def variety(images: ByteArray) -> float:
    """Returns the difference between the images of one word (`statistics.diversity`), averaged over the words."""
    return float(np.mean([diversity(group) or 0.0 for group in images]))


def contrast(images: ByteArray) -> float:
    """Returns the 95th minus the 5th percentile of an image's greys in 0..1, averaged over the images."""
    flat = images.astype(np.float32).mean(-1).reshape(-1, images.shape[-2] * images.shape[-3]) / 255
    low, high = np.percentile(flat, (5, 95), axis=1)
    return float(np.mean(high - low))


def template_accuracy(images: ByteArray, words: Sequence[str]) -> float:
    """Returns the share of letters that template matching recognises in images uint8 [len(words), copies, H, W, 3].

    A letter counts if, among the `templates` of all letters, one of the right letter correlates best with its cell.
    """
    right = []
    for word, group in zip(words, images, strict=True):
        for i, letter in enumerate(word):
            cells = standardised(group.astype(np.float32).mean(-1)[:, :, _columns(i)])
            best = [np.max(cells @ templates(other, i).T, axis=1) for other in LETTERS]
            right.append(np.argmax(best, axis=0) == LETTERS.index(letter))
    return float(np.mean(right))


def standardised(cells: FloatArray) -> FloatArray:
    """Flattens images [n, H, W] to [n, H * W], mean 0 and Euclidean norm 1: dot products are then correlations."""
    flat = cells.reshape(len(cells), -1)
    flat = flat - flat.mean(1, keepdims=True)
    return np.asarray(flat / (np.linalg.norm(flat, axis=1, keepdims=True) + 1e-6), dtype=np.float32)


@cache
def templates(letter: str, place: int) -> FloatArray:
    """Returns drawings [27, H * W] of a letter in cell `place` (0 to 2), dark on light: three sizes, each with nine
    shifts."""
    drawn = []
    for size, x, y in itertools.product((12, 13, 14), (-1, 0, 1), (-1, 0, 1)):
        image = Image.new("L", (SIDE, SIDE), 255)
        at = 1 + x + 10 * (place + 0.5), SIDE / 2 + y
        ImageDraw.Draw(image).text(at, letter, font=ImageFont.load_default(size), fill=0, anchor="mm")
        drawn.append(np.asarray(image, dtype=np.float32)[:, _columns(place)])
    return standardised(np.stack(drawn))


def _columns(place: int) -> slice:
    return slice(1 + 10 * place, 11 + 10 * place)


def before_after(before: ByteArray, after: ByteArray, scale: int = 3) -> ByteArray:
    """Draws a column per word: two images of `before`, a white line, two of `after`.

    Both are uint8 [words, copies, H, W, 3] with at least two copies.
    """
    strips = [np.concatenate(list(images[:, k]), axis=1) for images in (before, after) for k in range(2)]
    gap = np.full((4, *strips[0].shape[1:]), 255, dtype=np.uint8)
    grid = np.concatenate([*strips[:2], gap, *strips[2:]])
    return grid.repeat(scale, axis=0).repeat(scale, axis=1)


if __name__ == "__main__":
    main()
