"""Tests of text on the command line, which is taken as typed, and of entries that a dictionary lacks."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from async_flowrl.config.compose import as_typed, compose_config, composed

AS_TYPED = (
    "模糊", "😀", "50% off #1", "run #3", "runs/a=b", "exp[1]", "a, b", "a,b", "{x}", "{a: b}", "[a]", "a: b", "~x",
    "+x", "don't", '"a" "b"', "(a)", "choice(a,b)", "a\\b", "C:\\", "a\\'b", " a b ", "1e3", "007", "true", "$5",
    "a\nb", "",
)  # fmt: skip


@pytest.mark.parametrize("text", AS_TYPED)
def test_every_character_is_kept(text: str) -> None:
    key = f"rollout.negative_prompt={text}"
    overrides = [key, f"name={text}", f"rollout.environment.X={text}", f"reward.terms.color.name={text}"]
    config = compose_config(overrides=overrides)
    assert config.rollout.negative_prompt == config.rollout.environment["X"] == text
    assert config.reward.terms["color"].name == config.name == text
    recorded = OmegaConf.to_container(composed("one_step_off", [key], None).hydra.overrides.task, resolve=False)
    assert [as_typed(each) for each in recorded] == [key]  # commands are printed as they were given


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
