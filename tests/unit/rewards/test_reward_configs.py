"""Tests of the shipped reward and data groups: each composes, builds, and accepts its own prompts."""

import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from async_flowrl.config.compose import compose_config
from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import Config
from async_flowrl.data.load import load_data
from async_flowrl.rewards.registry import build_reward, check_prompts, check_rewards
from async_flowrl.types import Prompt

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


@pytest.mark.parametrize("group", GROUPS)
def test_reward_groups_build(group: str) -> None:
    config = composed(reward=group, data="ocr" if "ocr" in group else "two_prompts")
    reward = build_reward(config.reward)
    assert reward.weights
    if any(term.sources for term in reward.terms):
        with pytest.raises(ValueError, match="has no image that it edits"):
            check_prompts(config.reward, [Prompt(0, "make it red")])
        return
    needs_target = check_rewards(config.reward)
    data = load_data(config.data, needs_target=needs_target)
    for prompts in (data.train, data.evaluation):
        check_prompts(config.reward, prompts)


def test_the_command_line_of_the_custom_reward_example(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[3] / "examples" / "custom_reward"
    monkeypatch.syspath_prepend(str(example))
    block = (example / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    _, program, verb, flag, mode, *overrides = shlex.split(block.replace("\\\n", " "))
    assert (program, verb, flag) == ("async-flowrl", "train", "--config-name")
    config = compose_config(mode, overrides)
    assert (config.name, build_reward(config.reward).weights) == ("sharpness", {"sharp": 1.0})
    assert config.reward.terms["sharp"].options == {"scale": 10.0}
