"""The example servers, with another scorer in the model's place, asked by the http reward."""

import asyncio
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.registry import check_rewards
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


@pytest.mark.parametrize("name", ["hpsv3_server", "image_reward_server"])
def test_they_need_nothing_of_ours_but_what_their_requirements_bring(name: str) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'ray', 'hydra', 'omegaconf', 'httpx', 'tenacity']))\n"
        f"sys.argv[:] = ['{name}.py', '--host', '0.0.0.0']\n"
        f"import runpy; runpy.run_path({str(FOLDER / name)!r} + '.py', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER.parents[1], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2 and "--host 0.0.0.0 is not this machine alone" in ran.stderr, ran.stderr


def test_the_configuration_of_the_readme(tmp_path: Path) -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "hpsv3.yaml").write_text(text)
    assert OmegaConf.create(text).terms.hpsv3.serve.gpus == 1
    config = compose_config("one_step_off", ["reward=hpsv3"], tmp_path)
    check_rewards(config.reward)
    serve = config.reward.terms["hpsv3"].serve
    assert serve is not None and (FOLDER.parents[1] / str(serve.requirements)).exists()
