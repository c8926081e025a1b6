"""Tests of the image files of evaluations: small images are kept bit for bit, large ones are reduced."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from async_flowrl.observability.contact_sheet import contact_sheets
from async_flowrl.observability.images import write_images
from async_flowrl.observability.statistics import diversity


def test_small_images_are_kept_bit_for_bit_and_large_ones_reduced(tmp_path: Path) -> None:
    small = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    large = np.full((1, 300, 600, 3), 200, dtype=np.uint8)
    details = [{"prompt": "a", "extras": {}}, {"prompt": "b", "extras": {}}]
    write_images(tmp_path / "step", {4: small, 0: large}, details, most=2, side=200)
    index = json.loads((tmp_path / "step" / "index.json").read_text())["prompts"]
    assert [(each["place"], each["prompt"], each["files"]) for each in index] == [
        (4, "a", ["004_0.png", "004_1.png"]),
        (0, "b", ["000_0.webp"]),
    ]
    assert (np.asarray(Image.open(tmp_path / "step" / "004_1.png")) == small[1]).all()
    shown = Image.open(tmp_path / "step" / "000_0.webp")
    assert shown.size == (200, 100) and abs(int(np.asarray(shown)[50, 50, 0]) - 200) < 4


def test_an_evaluation_that_is_made_again_replaces_its_images(tmp_path: Path) -> None:
    images = {0: np.zeros((2, 8, 8, 3), dtype=np.uint8)}
    for most in (2, 1):
        write_images(tmp_path / "step", images, [{"prompt": "a", "extras": {}}], most=most, side=64)
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == ["000_0.png", "index.json"]


def test_videos_move_and_their_diversity_is_that_of_contact_sheets(tmp_path: Path) -> None:
    frames = np.arange(7, dtype=np.uint8)[None, :, None, None, None] * np.ones((2, 7, 8, 16, 3), dtype=np.uint8)
    write_images(tmp_path / "step", {0: frames}, [{"prompt": "a"}], most=1, side=200)
    with Image.open(tmp_path / "step" / "000_0.webp") as shown:
        seen = [np.asarray(frame.convert("RGB"))[0, 0, 0] for frame in ImageSequence.Iterator(shown)]
        assert shown.size == (16, 8) and seen == list(range(7)) and shown.info["loop"] == 0
    assert contact_sheets(frames)[0, 0, ::16, 0].tolist() == [0, 2, 4, 6]
    assert diversity(frames) == 0.0 and diversity(np.stack([frames[0], frames[0] + 51])) == pytest.approx(0.2)
