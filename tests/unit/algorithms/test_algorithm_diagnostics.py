"""Tests of the metrics by window, and of warnings."""

import pytest

from async_flowrl.algorithms.diagnostics import WindowGroup, clip_of_means, sample_size, warnings, window_metrics
from async_flowrl.config.schema import AlgorithmConfig


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
    (message,) = warnings(poor, correction="rollout_tis", kept=0.9)
    assert "0.25: engines that agree better (behaviour_gap)" in message
    assert warnings(poor, correction="mask", kept=0.8) == []
    (message,) = warnings({}, correction="none", kept=0.79)
    assert "only 0.79 of the gradients" in message


def test_gradients_of_good_images_alone_are_said() -> None:
    shares = {"gradient_kept/positive": 0.98, "gradient_kept/negative": 0.06}
    (message,) = warnings(shares, correction="mask", kept=0.9)
    assert "98%" in message and "6%" in message and "algorithm.correction_threshold" in message
    assert warnings(shares | {"gradient_kept/negative": 0.66}, correction="mask", kept=0.9) == []
    assert warnings({"gradient_kept/positive": 0.5}, correction="none", kept=0.9) == []


def test_an_update_beyond_what_runs_survived() -> None:
    (message,) = warnings({"kl_per_update": 3.14}, correction="none", kept=1.0, elements=1024)
    assert "3.1 nats per image" in message and "algorithm.max_kl_per_update" in message
    assert warnings({"kl_per_update": 1.0}, correction="none", kept=1.0, elements=1024) == []
    assert warnings({"kl_per_update": 3.14}, correction="none", kept=1.0, elements=65_536) == []


def test_a_gap_between_engines_as_large_as_the_clip_range() -> None:
    (message,) = warnings({"behaviour_gap": 3e-5}, correction="none", kept=1.0, clip=1e-5)
    assert "algorithm.correction=rollout_tis" in message
    assert "disagree by 3.0e-05" in message and "algorithm.clip_range" in message and "model.dtype=float32" in message
    (message,) = warnings({"behaviour_gap": 3e-5}, correction="rollout_tis", kept=1.0, clip=1e-5)
    assert "rollout_tis" not in message and message.endswith("model.dtype=float32")
    assert warnings({"behaviour_gap": 9e-6}, correction="none", kept=1.0, clip=1e-5) == []
    (message,) = warnings({"behaviour_gap": 3e-5}, correction="none", kept=1.0, clip=1e-5, guidance=4.5)
    assert "rollout.true_cfg_scale=4.5" in message
    assert warnings({"behaviour_gap": 3e-5}, correction="none", kept=1.0, clip=None) == []


def test_the_clip_range_on_the_scale_of_the_gap() -> None:
    """The gap is a mean over latent elements; clip_unit=nats bounds their sum."""
    assert clip_of_means(AlgorithmConfig(clip_range=1e-4), 256) == 1e-4
    assert clip_of_means(AlgorithmConfig(clip_range=0.64, clip_unit="nats"), 64) == 0.01
    assert clip_of_means(AlgorithmConfig(name="flow_dppo", clip_range=1e-6), 64) is None
