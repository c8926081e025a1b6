"""Tests of built-in rewards on images whose score is known."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.data.prompts import PromptError
from async_flowrl.observability import statistics
from async_flowrl.rewards.image_statistics import (
    Color,
    colorfulness,
    contrast,
    diversity,
    jpeg_compressibility,
    jpeg_incompressibility,
    sharpness,
)
from async_flowrl.rewards.ocr import OCR, text_score
from async_flowrl.rewards.vlm_judge import VLMJudge
from async_flowrl.types import ByteArray, Prompt

SIGN = Prompt(0, 'a sign that reads "Welcome"', target="Welcome")


def painted(text: str, side: int = 128, size: int = 24) -> ByteArray:
    image = Image.new("RGB", (side, side), "white")
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((6, side // 3), text, fill="black", font=font)
    return np.asarray(image)


def flat(red: int, green: int, blue: int) -> ByteArray:
    return np.full((16, 16, 3), (red, green, blue), dtype=np.uint8)


def test_ocr_scores_the_right_word_a_misspelling_in_part_and_no_other() -> None:
    *scores, misspelt = OCR()(np.stack([painted(text) for text in ("Welcome", "BXZKQ", "", "Welcane")]), SIGN)
    assert scores == [1.0, 0.0, 0.0] and 0.5 < misspelt < 1.0


ALIKE = {
    "CAFE\u0301": "CAFÉ",
    "ＡＢＣ": "ABC",
    "OP\u200bEN": "OPEN",
    "\ufeffOP\u00adEN": "open",
    "don’t": "don't",
    "straße": "STRASSE",
    "“A”–B": '"a"-b',
    "❤\ufe0f": "❤",
    "ﬁn": "FIN",
    "ΣΑΣ": "σας",
    "a\u00a0b": "AB",
}


@pytest.mark.parametrize(("one", "other"), ALIKE.items())
def test_what_looks_alike_is_alike(one: str, other: str) -> None:
    assert text_score(one, other) == text_score(other, one) == 1.0
    assert text_score(one, f"{other}Z") < 1.0


@pytest.mark.parametrize("target", ["\u200b", "\ufe0f", "\u00ad \u3164", "\u2800"])
def test_a_target_that_no_image_can_show_is_refused_with_its_line(target: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f'a sign "OPEN"\na sign "{target}"\n', encoding="utf-8")
    for check in (OCR().check, VLMJudge("http://127.0.0.1:1/v1", "m", mode="transcribe").check):
        with pytest.raises(PromptError, match=r"prompts\.txt:2: .*needs a target that can be seen"):
            load_data(DataConfig(train=str(prompts)), needs_target=True, check=check)


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("welcome", "Welcome", 1.0),
        ("you are w elc ome here", "Welcome", 1.0),
        ("welcom", "welcome", 1 - 1 / 7),
        ("", "welcome", 0.0),
        ("something entirely different", "abc", 0.0),
        ("ABCX", "abcd", 0.75),
    ],
)
def test_text_score(read: str, target: str, score: float) -> None:
    assert text_score(read, target) == pytest.approx(score)


def test_jpeg_rewards_are_kilobytes_at_quality_95() -> None:
    noise = np.random.RandomState(0).randint(0, 256, (64, 64, 3), dtype=np.uint8)
    images = np.stack([np.zeros_like(noise), noise])
    sizes = jpeg_incompressibility(images, SIGN)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format="JPEG", quality=95)
    assert sizes[1] == len(buffer.getvalue()) / 1000
    assert sizes[1] > 5 * sizes[0]
    assert list(jpeg_compressibility(images, SIGN)) == [-size for size in sizes]


def test_color_is_the_named_channel_minus_the_mean_of_the_others() -> None:
    images = np.stack([flat(255, 0, 0), flat(0, 0, 255), flat(100, 100, 100), flat(102, 51, 0)])
    assert Color()(images, Prompt(0, "red red red red")) == pytest.approx([1.0, -0.5, 0.0, 0.3])
    assert Color()(images, Prompt(0, "Blue sky")) == pytest.approx([-0.5, 1.0, 0.0, -0.3])
    assert Color(channel="green")(images, Prompt(0, "a cat"))[0] == pytest.approx(-0.5)


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    """By NumPy: luma of ITU-R BT.601, the kernel with 4 neighbours, borders mirrored without their own pixel."""

    def variance(luma: Any) -> float:
        grey = np.pad(np.rint(luma.astype(np.float64)), 1, mode="reflect")
        around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
        return float((around - 4 * grey[1:-1, 1:-1]).var())

    images = np.random.RandomState(0).randint(0, 256, (3, 9, 12, 3), dtype=np.uint8)
    greys = np.repeat(images[..., :1], 3, axis=-1)
    assert list(sharpness(greys, SIGN)) == pytest.approx([variance(grey[..., 0]) for grey in greys], rel=1e-12)
    weights = np.array([0.299, 0.587, 0.114])  # OpenCV's have 15 bits, so that some pixels are rounded differently
    assert list(sharpness(images, SIGN)) == pytest.approx([variance(image @ weights) for image in images], rel=5e-3)
    assert list(sharpness(flat(200, 10, 90)[None], SIGN)) == [0.0]


def test_colorfulness_is_m3_of_hasler_and_suesstrunk() -> None:
    """A red and a blue pixel: R - G is 255 and 0, (R + G) / 2 - B is 127.5 and -255."""
    red_and_blue = np.array([[(255, 0, 0), (0, 0, 255)]], dtype=np.uint8)
    spread = (127.5**2 + 191.25**2) ** 0.5
    distance = (127.5**2 + 63.75**2) ** 0.5
    assert list(colorfulness(red_and_blue[None], SIGN)) == pytest.approx([spread + 0.3 * distance])
    one_colour = 0.3 * ((100 - 40) ** 2 + ((100 + 40) / 2 - 20) ** 2) ** 0.5
    images = np.stack([flat(100, 40, 20), flat(77, 77, 77)])
    assert list(colorfulness(images, SIGN)) == pytest.approx([one_colour, 0.0])


def test_contrast_and_diversity() -> None:
    """Contrast is a range of greys; diversity a mean distance, whose mean over a group is that of evaluations."""
    flat, halves = np.full((1, 8, 8, 3), 100, np.uint8), np.zeros((1, 8, 8, 3), np.uint8)
    halves[:, 4:] = 255
    assert contrast(np.concatenate([flat, halves]), SIGN) == [0.0, 1.0]
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    scores = diversity(images, SIGN)
    far = [np.sqrt(np.mean((images[0] / 255 - other / 255) ** 2)) for other in images[1:]]
    assert scores[0] == pytest.approx(np.mean(far))
    assert np.mean(scores) == pytest.approx(statistics.diversity(images))
    assert diversity(flat, SIGN) == [0.0]
    twice = diversity(np.concatenate([images[:1], images]), SIGN)
    assert twice[0] == twice[1] == min(twice)
