"""Tests of settings of evaluations that are refused, or that follow from others."""

from collections.abc import Callable

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.curves import best_curve, check_curves
from async_flowrl.config.schema import Config, HeldOutConfig, RewardTerm
from async_flowrl.rewards.held_out import check_held_out
from tests.unit.recorded_evaluations import config_of


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: setattr(c.save, "best", "orc"), "did you mean 'ocr'"),
        (
            lambda c: setattr(c.evaluate, "reward", HeldOutConfig()) or setattr(c.evaluate, "on_hacking", "stop"),
            "held-out",
        ),
        (lambda c: setattr(c.evaluate, "baseline", True) or setattr(c.lora, "path", "x"), "lora.path=x"),
    ],
)
def test_what_contradicts_itself_is_refused(change: Callable[[Config], None], sentence: str) -> None:
    config = config_of()
    change(config)
    with pytest.raises(ValueError, match=sentence):
        check_curves(config)


@pytest.mark.parametrize(
    ("terms", "sentence"),
    [
        ({"size": RewardTerm(name="ocr")}, r"^evaluate\.reward\.terms\.size: reward\.terms has 'size' too"),
        ({"reward": RewardTerm(name="ocr")}, "choose another key"),
        ({"orc": RewardTerm()}, "evaluate.reward.terms.orc.*did you mean 'ocr'"),
        (
            {"away": RewardTerm(name="http")},
            r"^evaluate\.reward\.terms\.away: .* or evaluate\.reward\.terms\.away\.serve ",
        ),
    ],
)
def test_held_out_terms_that_cannot_be_are_refused(terms: dict[str, RewardTerm], sentence: str) -> None:
    config = config_of()
    config.evaluate.reward.terms = terms
    with pytest.raises(ValueError, match=sentence):
        check_held_out(config)


@pytest.mark.parametrize("section", ["reward.terms", "evaluate.reward.terms"])
def test_the_removed_requirements_of_a_server_are_refused_by_their_key(section: str) -> None:
    words = f"+{section}.away={{serve: {{command: 'x {{port}}', requirements: needs.txt}}}}"
    with pytest.raises(ConfigError, match=rf"key {section}\.away\.serve\.requirements is gone: .*uv run"):
        compose_config("one_step_off", [words])


def test_a_run_that_the_alarm_may_end_keeps_its_best_by_the_first_term_that_judges() -> None:
    assert best_curve(config_of("stop")) == "ocr" and best_curve(config_of()) is None
    assert best_curve(config_of("stop", best="reward")) == "reward"
