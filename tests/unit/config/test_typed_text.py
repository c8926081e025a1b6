"""Tests of the command line: text is taken as typed, a dictionary gets entries that it lacks, errors name the key."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import as_typed, compose_config, composed, typed
from async_flowrl.main import command_line

AS_TYPED = (
    "模糊", "😀", "50% off #1", "run #3", "runs/a=b", "exp[1]", "a, b", "a,b", "{x}", "{a: b}", "[a]", "a: b", "~x",
    "+x", "don't", '"a" "b"', "(a)", "choice(a,b)", "a\\b", "C:\\", "a\\'b", " a b ", "1e3", "007", "true", "$5",
    "a\nb", "",
)  # fmt: skip


def test_every_character_is_kept() -> None:
    named = {f"X{index}": text for index, text in enumerate(AS_TYPED)}
    overrides = [f"++rollout.environment.{name}={text}" for name, text in named.items()]
    values = composed("one_step_off", overrides, None)
    assert typed(values).rollout.environment == named
    recorded = OmegaConf.to_container(values.hydra.overrides.task, resolve=False)
    assert [as_typed(each) for each in recorded] == overrides  # commands are printed as they were given


@pytest.mark.parametrize("text", AS_TYPED[:3])
def test_every_kind_of_text_is_kept(text: str) -> None:
    texts = [f"rollout.negative_prompt={text}", f"name={text}", f"reward.terms.color.name={text}"]
    config = compose_config(overrides=texts)
    assert config.rollout.negative_prompt == config.reward.terms["color"].name == config.name == text


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("reward.terms.color.options.timeout=2", {"timeout": 2}),
        ("reward.terms.color.options={timeout: 2}", {"timeout": 2}),
        ("+reward.terms.color.options.a.b=[1]", {"a": {"b": [1]}}),
    ],
)
def test_a_dictionary_gets_what_it_lacks(override: str, found: dict[str, Any]) -> None:
    config = compose_config(
        overrides=[override, override.replace("reward.terms.color", "algorithm").lstrip("+"), "+seed=3"]
    )
    assert config.reward.terms["color"].options == config.algorithm.options == found and config.seed == 3


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("evaluate.every=null", "evaluate.every must be an integer, got null$"),
        ("rollout.resolutions.0=32", "rollout.resolutions must be a list"),
        ("trainer=null", "trainer must be one of .*, got 'null'"),
        ("trainer=1", "trainer must be one of .*, got '1'"),
        ("+foo.bar=1", "foo.bar is unknown.*, got 'foo'"),
        ("--config_name=sync", "--config_name .*; did you mean '--config-name'"),
        ("--trainer.learning_rate=1", "--trainer.learning_rate is no option.* key=value$"),
    ],
)
def test_what_is_wrong_is_named(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose_config(overrides=command_line([override])[0].overrides)


@pytest.mark.parametrize("group", ["launcher", "sweeper"])
def test_a_file_of_ones_own_chooses_groups_of_hydra(group: str, tmp_path: Path) -> None:
    lines = ["defaults:", "- one_step_off", f"- override hydra/{group}: basic", "- _self_"]
    (tmp_path / "own.yaml").write_text("\n".join(lines))
    chosen = composed("own", [], tmp_path).hydra[group]
    assert chosen._target_.startswith("hydra._internal.core_plugins.basic_")
