"""Tests of the command line: text is taken as typed, a dictionary gets entries that it lacks, errors name the key."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import as_typed, compose_config, composed, typed, with_replaced_terms
from async_flowrl.main import command_line

AS_TYPED = (
    "模糊", "😀", "50% off #1", "run #3", "runs/a=b", "exp[1]", "a, b", "a,b", "{x}", "{a: b}", "[a]", "a: b", "~x",
    "+x", "don't", '"a" "b"', "(a)", "choice(a,b)", "a\\b", "C:\\", "a\\'b", " a b ", "1e3", "007", "true", "$5",
    "a\nb", "",
)  # fmt: skip


def test_every_character_is_kept() -> None:
    named = {f"X{index}": text for index, text in enumerate(AS_TYPED)}
    overrides = [f"++rollout.environment.{name}={text}" for name, text in named.items()]
    overrides += [f"{key}={AS_TYPED[0]}" for key in ("rollout.negative_prompt", "name", "reward.terms.color.name")]
    values = composed("one_step_off", overrides, None)
    config = typed(values)
    assert config.rollout.environment == named
    assert config.rollout.negative_prompt == config.reward.terms["color"].name == config.name == AS_TYPED[0]
    recorded = OmegaConf.to_container(values.hydra.overrides.task, resolve=False)
    assert [as_typed(each) for each in recorded] == overrides  # commands are printed as they were given


@pytest.mark.extended
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
        ("evaluate.before_training=null", "got null; its default is true$"),
        ("limits=null", "got null$"),
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


def terms(*overrides: str) -> dict[str, tuple[float, str | None]]:
    reward = compose_config("one_step_off", list(overrides)).reward
    return {key: (term.weight, term.name) for key, term in reward.terms.items()}


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ((), {"color": (1.0, None)}),
        (("reward.terms={ocr: {weight: 2}}",), {"ocr": (2.0, None)}),
        (("+reward.terms={ocr: {}}",), {"ocr": (1.0, None)}),
        (("~reward.terms.color", "+reward.terms={mine: {name: 'a:b'}}"), {"mine": (1.0, "a:b")}),
        (("reward=ocr_and_compressibility", "reward.terms={ocr: {weight: 3}}"), {"ocr": (3.0, None)}),
        (("reward.terms={ocr: {}}", "reward.terms.ocr.weight=4"), {"ocr": (4.0, None)}),
        (("reward.terms.ocr.weight=4", "reward.terms={ocr: {}}"), {"ocr": (4.0, None)}),
        (("reward.terms={a: {}}", "reward.terms={ocr: {}}"), {"ocr": (1.0, None)}),
        (("+reward.terms.ocr={weight: 2}",), {"color": (1.0, None), "ocr": (2.0, None)}),
        (("reward.terms={a: {name: 'x:y'}}", "+reward.terms.ocr={}"), {"a": (1.0, "x:y"), "ocr": (1.0, None)}),
        (("reward.terms.color.weight=2",), {"color": (2.0, None)}),
    ],
)
def test_what_is_trained(overrides: tuple[str, ...], found: dict[str, tuple[float, str | None]]) -> None:
    assert terms(*overrides) == found


def test_options_of_a_replaced_term_of_the_same_name_do_not_survive() -> None:
    before = compose_config("one_step_off", ["reward=ocr_word"]).reward.terms["ocr"].options
    after = compose_config("one_step_off", ["reward=ocr_word", "reward.terms={ocr: {}}"]).reward.terms["ocr"].options
    assert before and not after


def test_a_sweep_is_replaced_job_by_job() -> None:
    swept = ["reward.terms={ocr: {}},{color: {weight: 2}}", "seed=1,2"]
    assert with_replaced_terms("one_step_off", swept) == [
        "seed=1,2",
        "~reward.terms.color",
        "+reward.terms={ocr: {}},{color: {weight: 2}}",
    ]


def test_held_out_terms_are_written_the_same_way_also_beside_trained_ones() -> None:
    for overrides, trained in (
        (["evaluate.reward.terms={b: {name: color}}"], "color"),
        (["+evaluate.reward.terms.b={name: color}"], "color"),
        (["reward.terms={a: {name: color}}", "evaluate.reward.terms={b: {name: color}}"], "a"),
        (["evaluate.reward.terms={b: {name: color}}", "reward.terms={a: {name: color}}"], "a"),
    ):
        config = compose_config("one_step_off", overrides)
        assert (list(config.reward.terms), list(config.evaluate.reward.terms)) == ([trained], ["b"])


@pytest.mark.extended
@pytest.mark.parametrize("section", ["reward", "evaluate.reward"])
@pytest.mark.parametrize(
    ("terms", "key"), [("{ocr: 1.0}", ".ocr"), ("{ocr: null}", ".ocr"), ("[ocr]", ""), ("ocr", "")]
)
def test_what_is_no_term_is_refused_by_its_key(section: str, terms: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.terms{key} must be a dictionary.* \{{.*weight: 1.0"):
        compose_config("one_step_off", [f"{section}.terms={terms}"])
