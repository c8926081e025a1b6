"""Edits to train on, and their reward: squares that should change their colour while the ground stays.

`python examples/editing/shapes.py FOLDER` writes images and FOLDER/edits.jsonl.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from async_flowrl.types import ByteArray, Prompt

COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
SIDE = 128


def write(folder: Path, count: int = 16) -> None:
    """Writes `count` images of a square on a grey ground, each with an edit and the box that it is about."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, names, rows = np.random.default_rng(0), list(COLORS), []
    for number in range(count):
        old, new = (names[place] for place in draw.permutation(len(names))[:2])
        left, top = (int(value) for value in draw.integers(8, 56, 2))
        box = [left, top, left + 64, top + 64]
        image = Image.new("RGB", (SIDE, SIDE), (int(draw.integers(120, 200)),) * 3)
        image.paste(COLORS[old], tuple(box))
        image.save(folder / f"{number}.png")
        prompt = f"make the {old} square {new}"
        rows.append({"prompt": prompt, "target": new, "image": f"{number}.png", "edit_box": box})
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def square_color(images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray]) -> list[float]:
    """Returns 1 - the mean distance of the pixels in the box from the colour `prompt.target`, as a share of 255."""
    height, width = images.shape[1] / sources[0].shape[0], images.shape[2] / sources[0].shape[1]
    left, top, right, bottom = prompt.metadata["edit_box"]
    square = images[:, round(top * height) : round(bottom * height), round(left * width) : round(right * width)]
    distance = np.abs(square - np.array(COLORS[prompt.target or ""], dtype=np.float64)).mean(axis=(1, 2, 3))
    return [float(value) for value in 1.0 - distance / 255.0]


square_color.sources = True  # type: ignore[attr-defined]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
