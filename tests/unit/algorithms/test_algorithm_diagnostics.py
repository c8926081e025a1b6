"""Metrics by window, and warnings."""

import pytest

from async_flowrl.algorithms.diagnostics import WindowGroup, sample_size, warnings, window_metrics


def test_metrics_by_window() -> None:
    groups = [
        WindowGroup(2, (0.0, 2.0), {"ratio_deviation_squared": 0.01, "clip_fraction": 0.5}),
        WindowGroup(0, (5.0, 5.0), {"ratio_deviation_squared": 0.04, "clip_fraction": 0.0}),
        WindowGroup(2, (0.0, 6.0), {"ratio_deviation_squared": 0.07, "clip_fraction": 0.0}),
        WindowGroup(4, (1.0, 3.0), {}),
    ]
    assert window_metrics(groups) == pytest.approx(
        {
            "window/0/reward_std": 0.0,
            "window/0/ratio_std": 0.2,
            "window/0/clip_fraction": 0.0,
            "window/2/reward_std": 2.0,
            "window/2/ratio_std": 0.2,
            "window/2/clip_fraction": 0.25,
            "window/4/reward_std": 1.0,
        }
    )


def test_warnings() -> None:
    poor = {"importance_weight": 1.0, "importance_weight_squared": 4.0}
    assert sample_size(poor) == 0.25 and sample_size({}) is None
    (message,) = warnings(poor, correction="tis", kept=0.9)
    assert "effective sample size of 0.25" in message
    assert warnings(poor, correction="mask", kept=0.8) == []
    (message,) = warnings({}, correction="none", kept=0.79)
    assert "only 0.79 of the gradients" in message
