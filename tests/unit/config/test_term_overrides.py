"""Tests of `reward.terms={…}` on the command line, which replaces the terms of the configuration."""

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config, with_replaced_terms


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


def test_held_out_terms_are_written_the_same_way() -> None:
    for override in ("evaluate.reward.terms={ocr: {}}", "+evaluate.reward.terms.ocr={}"):
        config = compose_config("one_step_off", [override])
        assert list(config.evaluate.reward.terms) == ["ocr"] and list(config.reward.terms) == ["color"]


def test_a_sweep_is_replaced_job_by_job() -> None:
    swept = ["reward.terms={ocr: {}},{color: {weight: 2}}", "seed=1,2"]
    assert with_replaced_terms("one_step_off", swept) == [
        "seed=1,2",
        "~reward.terms.color",
        "+reward.terms={ocr: {}},{color: {weight: 2}}",
    ]


def test_trained_and_held_out_terms_are_both_replaced_by_one_command() -> None:
    both = ["reward.terms={a: {name: color}}", "evaluate.reward.terms={b: {name: jpeg_compressibility}}"]
    for overrides in (both, both[::-1]):
        config = compose_config("one_step_off", overrides)
        assert (list(config.reward.terms), list(config.evaluate.reward.terms)) == (["a"], ["b"])


@pytest.mark.parametrize("section", ["reward", "evaluate.reward"])
@pytest.mark.parametrize(
    ("terms", "key"), [("{ocr: 1.0}", ".ocr"), ("{ocr: null}", ".ocr"), ("[ocr]", ""), ("ocr", "")]
)
def test_what_is_no_term_is_refused_by_its_key(section: str, terms: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{section}\.terms{key} must be a dictionary.* \{{.*weight: 1.0"):
        compose_config("one_step_off", [f"{section}.terms={terms}"])
