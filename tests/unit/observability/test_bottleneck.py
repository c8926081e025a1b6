"""Tests of the named bottleneck."""

import pytest

from async_flowrl.observability.bottleneck import bottleneck


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"busy": 60, "wait_data": 40}, {"busy": 98, "idle": 2}, "Rollout-bound: the trainer waited for images 40%"),
        ({"busy": 98, "wait_data": 2}, {"busy": 50, "idle": 50}, "Training-bound: rollout workers had nothing to"),
        ({"busy": 50, "wait_data": 50}, {"busy": 50, "idle": 50}, "The pools take turns"),
        ({"busy": 95, "wait_data": 5}, {"busy": 95, "idle": 5}, "The pools are balanced"),
        ({"busy": 90, "wait_data": 10}, {"busy": 50, "wait_weights": 50}, "Delivering weights is the bottleneck"),
        ({"busy": 50, "sync": 50}, {"busy": 80, "idle": 20}, "Publishing weights is the bottleneck"),
        ({}, {}, "Too little was recorded"),
    ],
)
def test_the_bottleneck_is_named(trainer: dict[str, float], rollout: dict[str, float], sentence: str) -> None:
    assert bottleneck({"trainer": trainer, "rollout": rollout}).startswith(sentence)
