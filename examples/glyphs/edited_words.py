"""Pictures of a word between two bars, and edits that put another word in its place: drawings, prompts, rewards.

python -m examples.glyphs.edited_words                               # the prompt files of experiment=glyphs_edit
python -m examples.glyphs.edited_words --permuted outputs/permuted   # those with another prompt's source in each row
python -m examples.glyphs.edited_words --picture outputs/edit edited.png
"""

import argparse
import base64
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.image_file import opened
from async_flowrl.rewards.image_statistics import EDIT_BOX, EditConsistency
from async_flowrl.rewards.ocr import OCR
from async_flowrl.types import ByteArray, Prompt
from examples.glyphs.words import SIDE, TEST, TRAIN, pretraining_words

BOX = (0, 8, 32, 24)
"""What an edit may change in a picture, in its pixels: left, top, right, bottom."""
PROMPTS = Path(__file__).resolve().parents[2] / "configs" / "prompts"
_SIZES, _PAPER, _INK, _BAR = (12, 14), (150, 255), (0, 90), (0, 255)
_BARS = (2, 6), (26, 30)
"""Rows of both bars. Each is as wide as the picture, or half as wide, on the left or on the right."""
_ENDS = (0, SIDE), (0, SIDE // 2), (SIDE // 2, SIDE)
_SOURCE = "source"
"""Column of a file with permuted sources: the picture that a result is compared with, as a data URI."""

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Look:
    """What an edit keeps: colours, the place and size of the word, and the bars."""

    paper: Color
    ink: Color
    size: int
    place: tuple[int, int]
    bars: tuple[tuple[Color, tuple[int, int]], ...]


def look(rng: random.Random) -> Look:
    paper, ink, *bars = (_color(rng, limits) for limits in (_PAPER, _INK, _BAR, _BAR))
    place = rng.randint(-1, 1), rng.randint(-1, 1)
    return Look(paper, ink, rng.randint(*_SIZES), place, tuple((bar, rng.choice(_ENDS)) for bar in bars))


def _color(rng: random.Random, limits: tuple[int, int]) -> Color:
    return rng.randint(*limits), rng.randint(*limits), rng.randint(*limits)


def draw_picture(word: str, seen: Look) -> ByteArray:
    """Draws a picture, uint8 [SIDE, SIDE, 3]; letters stand as in `words.draw`."""
    image = Image.new("RGB", (SIDE, SIDE), seen.paper)
    pen, font, (x, y) = ImageDraw.Draw(image), ImageFont.load_default(seen.size), seen.place
    for (top, bottom), (color, (left, right)) in zip(_BARS, seen.bars, strict=True):
        pen.rectangle((left, top, right - 1, bottom - 1), fill=color)
    cell = (SIDE - 2) / len(word)
    for i, letter in enumerate(word):
        pen.text((1 + x + cell * (i + 0.5), SIDE / 2 + y), letter, font=font, fill=seen.ink, anchor="mm")
    return np.asarray(image)


def prompt(word: str) -> str:
    """Returns the instruction of an edit."""
    return f'make the word "{word}"'


def edits(words: Sequence[str], copies: int, rng: random.Random) -> list[tuple[str, str, Look]]:
    """Returns `copies` edits of each word: the word that is asked for, the one that the source has, and the look."""
    known = pretraining_words()
    asked = [word for word in words for _ in range(copies)]
    return [(word, rng.choice([other for other in known if other != word]), look(rng)) for word in asked]


class EditedWord(OCR):
    """Reward: the word in the box of an edit, read as one line; the options are those of `OCR`."""

    def __call__(self, images: ByteArray, prompt: Prompt) -> Sequence[float]:
        rows = [edge * images.shape[1] // SIDE for edge in (BOX[1], BOX[3])]
        return super().__call__(images[:, slice(*rows)], prompt)


class Kept(EditConsistency):
    """Reward: `edit_consistency` with the row's column `source`, whatever picture the model was given."""

    sources = False

    def __call__(self, images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray] = ()) -> Sequence[float]:
        content = base64.b64decode(prompt.metadata[_SOURCE].partition(",")[2])
        return super().__call__(images, prompt, [np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))])


def data_uri(image: ByteArray) -> str:
    """Returns a picture as the cell of a prompt file."""
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")


def write(path: Path, words: Sequence[str], copies: int, seed: int, *, permuted: bool = False) -> None:
    """Writes a prompt file of edits, in random order; `permuted` gives each the source of the row after it."""
    rng = random.Random(seed)
    chosen = edits(words, copies, rng)
    rng.shuffle(chosen)
    sources = [data_uri(draw_picture(word, seen)) for _, word, seen in chosen]
    given = sources[1:] + sources[:1] if permuted else sources
    rows = [
        {"prompt": prompt(word), "target": word, "image": image, EDIT_BOX: list(BOX)}
        | ({_SOURCE: source} if permuted else {})
        for (word, _, _), image, source in zip(chosen, given, sources, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw_results(run: Path, out: Path, columns: int = 16) -> None:
    """Draws sources, and below each one edit before and one after the training, from the images of a run."""
    data = DataConfig(train="prompts/glyphs_edit_train.jsonl", evaluation="prompts/glyphs_edit_test.jsonl")
    asked = load_data(data, needs_target=True).evaluation[:columns]
    first, *_, last = sorted(path for path in (run / "images").glob("step_*") if path.is_dir())
    rows = [[opened(row.images[0]) for row in asked]]
    rows += [[Image.open(folder / f"{number:03d}_0.webp") for number in range(columns)] for folder in (first, last)]
    grid = [[np.asarray(image.resize((64, 64), Image.Resampling.BOX)) for image in row] for row in rows]
    Image.fromarray(np.concatenate([np.concatenate(row, axis=1) for row in grid])).save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--permuted", type=Path, metavar="FOLDER", help="write files with permuted sources into it")
    parser.add_argument("--picture", type=Path, nargs=2, metavar=("RUN", "PNG"), help="draw what a run learned")
    arguments = parser.parse_args()
    if arguments.picture is not None:
        draw_results(*arguments.picture)
        return
    folder = arguments.permuted
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for name, words, seed in (("train", TRAIN, 21), ("test", TEST, 22)):
        write((folder or PROMPTS) / f"glyphs_edit_{name}.jsonl", words, 4, seed, permuted=folder is not None)


if __name__ == "__main__":
    main()
