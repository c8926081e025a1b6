"""Every shipped reward and data group composes, builds, and accepts its own prompts."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from async_flowrl.config.paths import config_dir
from async_flowrl.config.schema import Config
from async_flowrl.data.load import load_prompts
from async_flowrl.rewards.registry import REWARDS, build_reward, check_prompts, check_rewards

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


def test_every_built_in_reward_has_a_group() -> None:
    assert set(REWARDS) <= set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_reward_groups_build(group: str) -> None:
    config = composed(reward=group, data="ocr" if "ocr" in group else "two_prompts")
    assert build_reward(config.reward).weights
    needs_target = check_rewards(config.reward)
    for split in ("train", "evaluation"):
        prompts = load_prompts(config.data, split=split, needs_target=needs_target, base=config_dir())
        check_prompts(config.reward, prompts)


def test_the_command_line_of_the_custom_reward_example(monkeypatch: pytest.MonkeyPatch) -> None:
    example = Path(__file__).parents[3] / "examples" / "custom_reward"
    monkeypatch.syspath_prepend(str(example))
    line = next(text for text in (example / "README.md").read_text().splitlines() if "~reward" in text)
    removed, added = (part for part in line.split("'") if part.strip())
    reward = build_reward(composed(removed, added).reward)
    assert reward.weights == {"sharp": 1.0}
