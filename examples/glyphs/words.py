"""Words of the glyphs example and how they are drawn.

Drawings use Pillow's default font; position, font size, paper grey and ink grey vary at random.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from async_flowrl.types import ByteArray

LETTERS = "ACEHMNPRTU"
"""Letters of all words: capitals that OCR does not mistake for digits."""
_TRAINED = (
    "ACE ACT ANT APE APT ARC ARM ART ATE CAN CAP CAR CUE CUP EAT HAM HAT HER HUE HUT MAN MAP MEN MUM NAP NUN NUT "
    "PAN PAR PEA PEN PER PET PUN PUT RAM RAN RAT RUE RUM RUN TAN TAP TAR TEN"
)
TRAIN = tuple(_TRAINED.split())
"""The 45 words that RL trains on."""
_HELD_OUT = "CAT ARE CUT EAR HEN HUM MAT MET NET PAT RAP RUT TEA NAH CAM RAE"
TEST = tuple(_HELD_OUT.split())
"""The 16 held-out words: neither pretraining nor RL trains on them."""
WEIGHTS = Path(__file__).parent / "weights"
"""Folder of the pretrained model that every run begins with."""
SIDE = 32
"""Height and width of an image in pixels."""
_SIZES = 12, 14
_SHIFT = 1
"""Largest offset of a word from the middle, in pixels, in each direction."""
_PAPER, _INK = (150, 255), (0, 90)


def prompt(word: str) -> str:
    """Returns the prompt for a word."""
    return f'the word "{word}"'


def pretraining_words() -> list[str]:
    """Returns the 984 strings of three letters that are not held-out words."""
    every = ("".join(letters) for letters in itertools.product(LETTERS, repeat=3))
    return [word for word in every if word not in TEST]


def draw(word: str, rng: random.Random, side: int = SIDE) -> ByteArray:
    """Draws a word once, dark grey on light grey: uint8 [side, side].

    Every letter stands in the middle of its own cell; the cells have equal widths.
    """
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
    """Draws every word once: uint8 [n, side, side]."""
    return np.stack([draw(word, rng, side) for word in words])
