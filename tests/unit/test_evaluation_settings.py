"""Tests of settings of evaluations that are refused, or that follow from others."""

from async_flowrl.config.curves import best_curve
from tests.unit.recorded_evaluations import config_of


def test_a_run_that_the_alarm_may_end_keeps_its_best_by_the_first_term_that_judges() -> None:
    assert best_curve(config_of("stop")) == "ocr" and best_curve(config_of()) is None
    assert best_curve(config_of("stop", best="reward")) == "reward"
