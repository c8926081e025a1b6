"""Tests of the example reward servers with a small scorer instead of a model, called by the http reward."""

import asyncio
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.types import Prompt
from tests.support.reward_server import served

FOLDER = Path(__file__).parents[3] / "examples" / "reward_servers"
IMAGES = np.arange(5 * 4 * 4 * 3, dtype=np.uint8).reshape(5, 4, 4, 3)


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECKOUT = """
MY_CONFIG_PATH = MY_CKPT_PATH = None

def load_geneval():
    assert MY_CONFIG_PATH.endswith("/config.py") and MY_CKPT_PATH.endswith("/weights")
    assert open("reward_server/object_names.txt").read() == "cup\\n"

    def compute(images, rows, only_strict):
        assert not only_strict and all(image.size == (4, 4) for image in images)
        assert all(row["prompt"] == "two cups" and row["include"][0]["class"] == "cup" for row in rows)
        return [0.5] * len(rows), [1.0] * len(rows), [0.0] * len(rows), {}, {}

    return compute
"""


async def ask(url: str) -> list[Any]:
    return await HTTP(url)(IMAGES, Prompt(0, "a cup"))


def test_hpsv3() -> None:
    calls: list[int] = []

    def reward(pictures: list[Any], prompts: list[str]) -> Any:
        assert prompts == ["a cup"] * len(pictures)
        calls.append(len(pictures))
        return np.stack([[np.asarray(picture).mean(), math.log(0.5)] for picture in pictures])

    with served(example("hpsv3_server").scorer(reward, batch_size=2)) as url:
        found = asyncio.run(ask(url))
    assert found == [{"score": float(image.mean()), "sigma": 0.5} for image in IMAGES]
    assert calls == [2, 2, 1]


def test_image_reward() -> None:
    with served(example("image_reward_server").scorer(lambda prompt, picture: len(prompt) + picture.width)) as url:
        assert asyncio.run(ask(url)) == [9.0] * 5


def test_geneval_gets_the_rows_of_the_prompt_file_and_the_checkout_its_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the server's own loader: a checkout whose `load_geneval` stands in for the detector's."""
    (tmp_path / "reward_server").mkdir()
    (tmp_path / "reward_server" / "__init__.py").touch()
    (tmp_path / "reward_server" / "object_names.txt").write_text("cup\n")
    (tmp_path / "reward_server" / "gen_eval.py").write_text(CHECKOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = example("geneval_server")
    row = {"tag": "counting", "include": [{"class": "cup", "count": 2}]}
    with served(module.scorer(module.loaded(tmp_path, tmp_path / "config.py", tmp_path / "weights"))) as url:
        reply = asyncio.run(HTTP(url)(IMAGES[:2], Prompt(0, "two cups", metadata=row)))
        with pytest.raises(ServerError, match=r"422 .*a cup.* is no row of GenEval: it has no tag and no include"):
            asyncio.run(ask(url))
    assert reply == [{"score": 0.5, "correct": 1.0, "strict": 0.0}, {"score": 0.5, "correct": 1.0, "strict": 0.0}]
