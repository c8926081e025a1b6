"""Which words there are, and how one is drawn: Pillow's own font; place, size and both greys vary a little."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from async_flowrl.types import ByteArray

LETTERS = "ACEHMNPRTU"
"""Capitals that OCR does not mistake for digits."""
_TRAINED = (
    "ACE ACT ANT APE APT ARC ARM ART ATE CAN CAP CAR CUE CUP EAT HAM HAT HER HUE HUT MAN MAP MEN MUM NAP NUN NUT "
    "PAN PAR PEA PEN PER PET PUN PUT RAM RAN RAT RUE RUM RUN TAN TAP TAR TEN"
)
TRAIN = tuple(_TRAINED.split())
_HELD_OUT = "CAT ARE CUT EAR HEN HUM MAT MET NET PAT RAP RUT TEA NAH CAM RAE"
TEST = tuple(_HELD_OUT.split())
WEIGHTS = Path(__file__).parent / "weights"
"""The pretrained model that every run begins with."""
SIDE = 32
_SIZES = 12, 14
_SHIFT = 1
"""Pixels by which a word may be off the middle, each way."""
_PAPER, _INK = (150, 255), (0, 90)


def prompt(word: str) -> str:
    """What the text encoder is told."""
    return f'the word "{word}"'


def pretraining_words() -> list[str]:
    """Every string of three letters but the held-out words: 984 of them."""
    every = ("".join(letters) for letters in itertools.product(LETTERS, repeat=3))
    return [word for word in every if word not in TEST]


def draw(word: str, rng: random.Random, side: int = SIDE) -> ByteArray:
    """uint8 [side, side], one random rendering in two greys, dark on light; every letter has a cell of its own."""
    font = ImageFont.load_default(rng.randint(*_SIZES))
    paper, ink = rng.randint(*_PAPER), rng.randint(*_INK)
    image = Image.new("L", (side, side), paper)
    pen = ImageDraw.Draw(image)
    x, y = rng.randint(-_SHIFT, _SHIFT), rng.randint(-_SHIFT, _SHIFT)
    cell = (side - 2 * _SHIFT) / len(word)
    for i, letter in enumerate(word):
        pen.text((_SHIFT + x + cell * (i + 0.5), side / 2 + y), letter, font=font, fill=ink, anchor="mm")
    return np.asarray(image)


def draw_many(words: Sequence[str], rng: random.Random, side: int = SIDE) -> ByteArray:
    """uint8 [n, side, side], one rendering per word."""
    return np.stack([draw(word, rng, side) for word in words])
