"""Tests of the shipped reward and data groups: each composes, builds, and accepts its own prompts."""

import importlib
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from PIL import Image

from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import Config, DataConfig, RewardConfig, RewardTerm
from async_flowrl.data.load import load_data
from async_flowrl.rewards.registry import build_reward, check_rewards, is_deterministic, prompt_check
from async_flowrl.types import Prompt, Scores
from tests.support.lying_server import answer, lying
from tests.unit.rewards.own_rewards import scored

GROUPS = sorted(path.stem for path in (config_dir() / "reward").glob("*.yaml"))


def composed(*overrides: str, reward: str = "color", data: str = "two_prompts") -> Config:
    store = ConfigStore.instance()
    store.store(name="reward_test_schema", node=Config)
    defaults = ["reward_test_schema", {"reward": reward}, {"data": data}, "_self_"]
    store.store(name="reward_test", node={"defaults": defaults})
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        config = OmegaConf.to_object(compose("reward_test", list(overrides)))
    assert isinstance(config, Config)
    return config


@pytest.mark.extended
@pytest.mark.parametrize("group", GROUPS)
def test_reward_groups_build(group: str) -> None:
    config = composed(reward=group, data="ocr" if "ocr" in group else "two_prompts")
    reward, check = build_reward(config.reward), prompt_check(config.reward)
    assert reward.weights
    if any(term.sources for term in reward.terms):
        with pytest.raises(ValueError, match="has no image that it edits"):
            check(Prompt(0, "make it red"))
        return
    needs_target = check_rewards(config.reward)
    data = load_data(config.data, needs_target=needs_target)
    if needs_target:
        assert not {prompt.text for prompt in data.train} & {prompt.text for prompt in data.evaluation}, "held out"
    if check is not None:
        data.train.check_each(check)
        data.evaluation.check_each(check)


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
    flat = np.full((8, 8, 3), 255, dtype=np.uint8)
    stripes = np.tile(np.array([0, 255], dtype=np.uint8)[None, :, None], (8, 4, 3))
    scores = scored(config, Prompt(0, "stripes"), np.stack([flat, stripes]))
    assert scores.by_term == {"sharp": (0.0, 1.0), "judge": (1.0, 0.5)}
    assert not is_deterministic(config)


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


PAGE = Path(__file__).parents[3] / "docs" / "extending" / "reward.md"
BLOCKS = dict(re.findall(r"^<!-- reward: (\w+) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
PROMPT = Prompt(0, "a red wall")
IMAGES = np.random.RandomState(0).randint(0, 256, (4, 8, 8, 3)).astype(np.uint8)


def score(name: str, **options: Any) -> Scores:
    """Scores by the block's reward, which is imported by its path as a user's is."""
    module = ModuleType(f"page_{name}")
    exec(BLOCKS[name], vars(module))
    sys.modules[module.__name__] = module
    config = RewardConfig(terms={"mine": RewardTerm(name=f"{module.__name__}:{name}", options=options)}, backoff=0.0)
    try:
        scores = scored(config, PROMPT, IMAGES)
        assert not scores.failed, scores.failed["mine"].traceback
        return scores
    finally:
        del sys.modules[module.__name__]


def test_groupwise() -> None:
    means = IMAGES.mean(axis=(1, 2)) / 255
    assert score("redness").total == pytest.approx(means[:, 0] - means[:, 1:].mean(axis=1))


def test_pointwise_with_extras() -> None:
    scores = score("Exposure", target=0.4)
    light = scores.extras["mine"]["mean_light"]
    assert light == pytest.approx(IMAGES.mean(axis=(1, 2, 3)) / 255)
    assert scores.total == pytest.approx([-abs(float(x) - 0.4) for x in light])
    assert set(scores.extras["mine"]["verdict"]) == {"bright"}


def test_async() -> None:
    assert score("Patient").total == pytest.approx(10 / (1 + IMAGES.reshape(4, -1).std(axis=1)))


def test_remote() -> None:
    """By a judge that is busy the first time."""

    def first_byte(request: bytes) -> bytes:
        image = request.partition(b"\r\n\r\n")[2]
        return answer("200 OK", f'{{"score": {image[0]}}}')

    with lying(answer("503 Service Unavailable"), first_byte) as judge:
        scores = score("Remote", url=f"{judge.url}/judge")
    assert scores.total == tuple(float(image.tobytes()[0]) for image in IMAGES) and scores.retries == {"mine": 1}
    assert len(judge.asked) == 5
