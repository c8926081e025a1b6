"""Tests of a warning after a step, which is given once, and of the order of what comes after the last one."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.after_step import AfterStep
from async_flowrl.controller.context import RewardCalls
from async_flowrl.observability.summary import warnings_of

GAPS = (1e-8, 3.1e-5, 4.2e-5)


@pytest.mark.parametrize(("ratios", "warned_at"), [([1.0] * 7, 4), ([1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0], None)])
def test_a_reward_that_never_tells_images_apart_is_warned_of_once(
    ratios: list[float], warned_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    unused = cast("Any", None)
    records = cast("Any", SimpleNamespace(show=None, failed=None))
    after = AfterStep(unused, unused, unused, unused, records, latent_elements=64)
    lines = [{"step": step, "zero_std_ratio": ratio} for step, ratio in enumerate(ratios)]
    with caplog.at_level(logging.WARNING):
        for line in lines:
            after._warn(cast("Any", SimpleNamespace(config=Config(), reward_calls=RewardCalls())), line)
    told = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in told] == ([] if warned_at is None else [f"step {warned_at}"])
    assert bool(warnings_of(cast("Any", lines))) == (warned_at is not None)


@pytest.mark.parametrize(
    ("unit", "clip", "warned_at"), [("mean", 1e-5, 1), ("nats", 1e-5 * 64, 1), ("mean", 1e-3, None)]
)
def test_engines_that_disagree_by_the_clip_range_are_warned_of_once(
    unit: str, clip: float, warned_at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config()
    config.algorithm.clip_unit, config.algorithm.clip_range = unit, clip
    unused = cast("Any", None)
    records = cast("Any", SimpleNamespace(show=None, failed=None))
    after = AfterStep(unused, unused, unused, unused, records, latent_elements=64)
    with caplog.at_level(logging.WARNING):
        for step, gap in enumerate(GAPS):
            after._warn(
                cast("Any", SimpleNamespace(config=config, reward_calls=RewardCalls())),
                {"step": step, "behaviour_gap": gap},
            )
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (warned_at is not None)
    for message in told:
        assert message.startswith(f"step {warned_at}: rollout and trainer disagree by 3.1e-05")
        assert "algorithm.clip_range" in message and "algorithm.correction=rollout_tis" in message
