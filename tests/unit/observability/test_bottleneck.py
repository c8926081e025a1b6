"""Tests of the named bottleneck and of the split that is advised."""

from typing import Any

import pytest

from async_flowrl.config.check import check
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.reward import RewardConfig, RewardTerm
from async_flowrl.config.shared_advice import sharing_refusal
from async_flowrl.observability.bottleneck import better_placement, bottleneck, unknown, verdict
from async_flowrl.observability.timeline import tracks


@pytest.mark.parametrize(
    ("trainer", "rollout", "sentence"),
    [
        ({"busy": 60, "wait_data": 40}, {"busy": 98, "idle": 2}, "Rollout-bound: the trainer waited for images 40%"),
        (
            {"busy": 98, "wait_data": 2},
            {"busy": 50, "idle": 50},
            "Training-bound: rollout workers had nothing to",
        ),
        ({"busy": 50, "wait_data": 50}, {"busy": 50, "idle": 50}, "The pools take turns"),
        ({"busy": 95, "wait_data": 5}, {"busy": 95, "idle": 5}, "The pools are balanced"),
        ({"busy": 90, "wait_data": 10}, {"busy": 50, "wait_weights": 50}, "Delivering weights is the bottleneck"),
        ({"busy": 50, "sync": 50}, {"busy": 80, "idle": 20}, "Publishing weights is the bottleneck"),
        ({}, {}, "Too little was recorded"),
    ],
)
def test_the_bottleneck_is_named(trainer: dict[str, float], rollout: dict[str, float], sentence: str) -> None:
    assert bottleneck({"trainer": trainer, "rollout": rollout}).startswith(sentence)


def usual() -> Config:
    """A configuration of two pools that could be one."""
    return Config(reward=RewardConfig(terms={"color": RewardTerm()}))


def worked(rollout: float, trainer: float, each: int) -> list[dict[str, object]]:
    """Spans of so many workers of each pool, in which a worker computes so many of 10 seconds."""
    return [
        {"time": 10.0, "event": "span", "worker": f"{pool}-{index}", "name": "work", "start": 0.0, "end": seconds}
        for pool, seconds in (("rollout", rollout), ("trainer", trainer))
        for index in range(each)
    ]


@pytest.mark.parametrize(
    ("busy", "split"), [((10.0, 6.0), "5:3"), ((8.0, 8.0), None), ((2.0, 6.0), "2:6"), ((1.0, 7.0), "1:7")]
)
def test_another_split_is_tried_where_it_would_be_faster(busy: tuple[float, float], split: str | None) -> None:
    """Eight devices, four each; any number of ranks can share a group. No placement is faster than the best split."""
    events = worked(*busy, each=4)
    better = better_placement(tracks(events), (0.0, 10.0))
    assert better == (f"{split} devices" if split else None)
    if split:
        pools = {"trainer": {"busy": 60, "wait_data": 40}, "rollout": {"busy": 98, "idle": 2}}
        assert bottleneck(pools, better).endswith(f"; try {split} devices.")
    assert better_placement(tracks(events[:4]), (0.0, 10.0)) is None, "no trainer was seen"


@pytest.mark.parametrize(
    ("busy", "each", "saved"),
    [
        ((9.0, 3.0), 1, "33%"),
        ((3.0, 9.0), 1, "33%"),
        ((8.0, 7.6), 1, None),
        ((8.0, 7.4), 1, "4%"),
        ((8.0, 4.0), 4, "25%"),
    ],
)
def test_shared_processes_are_tried_where_no_split_matches(
    busy: tuple[float, float], each: int, saved: str | None
) -> None:
    """(G + T)/N must be at least 3 % below the best split: with two devices at 3 : 1, or with 5.3 : 2.7 of eight."""
    events = worked(*busy, each=each)
    better = better_placement(tracks(events), (0.0, 10.0), usual)
    if saved is None:
        assert better is None
        return
    assert better is not None and better.startswith("placement=shared, where each of the")
    assert f"up to {saved} less time" in better


def test_the_verdict_on_two_devices_at_three_to_one_is_to_share() -> None:
    events = [
        {"time": 0.0, "event": "state", "worker": "trainer-0", "state": "wait_data"},
        *worked(9.0, 3.0, each=1),
        {"time": 10.0, "event": "step", "step": 0, "started": 0.0, "ended": 10.0},
    ]
    told = verdict(tracks(events), events, placement="separate", config=usual)
    assert told.startswith("Rollout-bound: the trainer waited for images 70% of the time; try placement=shared, where ")
    assert "up to 33% less time" in told


@pytest.mark.parametrize(
    "settings",
    [
        {"rollout.engine": "vllm_omni"},
        {"trainer.shard": "full"},
        {"trainer.cpu_offload": True},
        {"rollout.min_workers": 1, "runtime.address": "auto"},
        {"checkpoint_engine.transport": "gloo"},
        {"runtime.backend": "local"},
    ],
    ids=str,
)
def test_sharing_is_not_advised_where_it_would_be_refused(settings: dict[str, Any]) -> None:
    """The configuration runs with two pools, and `placement=shared` would be refused for it."""
    config = usual()
    for key, value in settings.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    check(config)
    assert sharing_refusal(config, 2) is not None
    events = worked(9.0, 3.0, each=1)
    assert better_placement(tracks(events), (0.0, 10.0), lambda: config) is None, "nor is another split of two"
    assert better_placement(tracks(events), (0.0, 10.0), unknown) is None, "and not where nobody knows"
    assert better_placement(tracks(events), (0.0, 10.0), usual) is not None
