"""Tests of the example rewards: they do what their README says."""

import importlib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from async_flowrl.config.schema import DataConfig, RewardConfig, RewardTerm
from async_flowrl.data.load import load_data
from async_flowrl.rewards.registry import is_deterministic
from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.types import Prompt

EXAMPLES = Path(__file__).parents[3] / "examples"


def prepare(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["write_parquet.py", *arguments])
    runpy.run_path(str(EXAMPLES / "ocr" / "write_parquet.py"), run_name="__main__")


def test_prepare_writes_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, "--out", str(tmp_path), "--negative", "blurry")
    config = DataConfig(train=str(tmp_path / "train.parquet"), evaluation=str(tmp_path / "test.parquet"))
    train = load_data(config, needs_target=True).train
    test = load_data(config, needs_target=True).evaluation
    assert (len(train), len(test)) == (200, 40)
    assert all(prompt.target in prompt.text for prompt in train if prompt.target)
    assert {prompt.negative for prompt in [*train, *test]} == {"blurry"}
    assert all(prompt.system and prompt.system.startswith("Describe the image") for prompt in train)


def test_custom_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "custom_reward"))
    terms = {
        "sharp": RewardTerm(name="sharpness:sharpness", options={"scale": 2.0}),
        "judge": RewardTerm(name="sharpness:Judge", weight=0.5),
    }
    config = RewardConfig(terms=terms)
    worker = RewardWorker(config, index=0, name="reward-0")
    flat = np.full((8, 8, 3), 255, dtype=np.uint8)
    stripes = np.tile(np.array([0, 255], dtype=np.uint8)[None, :, None], (8, 4, 3))
    scores = worker.score(worker.reward.weights, Prompt(0, "stripes"), np.stack([flat, stripes]))
    assert scores.by_term == {"sharp": (0.0, 1.0), "judge": (1.0, 0.5)}
    assert not is_deterministic(config)
    worker.close()


def test_edits_of_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(EXAMPLES / "editing"))
    shapes = importlib.import_module("shapes")
    shapes.write(tmp_path, 2)
    for prompt in load_data(DataConfig(train=str(tmp_path / "edits.jsonl")), needs_target=True).train:
        source = np.asarray(Image.open(prompt.images[0].path))
        left, top, right, bottom = prompt.metadata["edit_box"]
        edited = source.copy()
        edited[top:bottom, left:right] = shapes.COLORS[prompt.target]
        before, after = shapes.square_color(np.stack([source, edited]), prompt, [source])
        assert after == 1.0 > before
