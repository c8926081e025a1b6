"""Tests of the report on shared processes: what limits them (devices, rewards, or the end of a step)."""

from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.observability.bottleneck import verdict
from async_flowrl.observability.events import Event
from async_flowrl.observability.summary import summarise
from async_flowrl.observability.timeline import device_time, tracks
from tests.support.toy import Timing
from tests.support.toy_shared import ENDING, TRAINING, shared_config, shared_virtual

STEP = {"time": 10.0, "event": "step", "step": 0, "started": 0.0, "ended": 10.0}


def span(worker: str, start: float, end: float) -> dict[str, Any]:
    return {"time": end, "event": "span", "worker": worker, "name": "work", "start": start, "end": end}


def said(*events: dict[str, Any]) -> str:
    return verdict(tracks(events), events, placement="shared")


def test_time_in_which_both_parts_work_counts_once() -> None:
    """The optimizer runs beside tickets: sampled and trained add up to the whole, and the device idled all the same."""
    events = span("rollout-0", 0, 6), span("trainer-0", 5, 9), STEP
    found = device_time(tracks(events), (0.0, 10.0))
    assert found == pytest.approx({"sampled": 0.6, "trained": 0.4, "idle": 0.1})
    assert "had nothing to do 10%" in said(*events)


def test_the_efficiency_of_the_summary_is_the_share_of_time_in_which_the_devices_worked() -> None:
    """Of 10 seconds both sample for 5, the first trains for 3 and the second for one; in the first steps both idle."""
    events: list[dict[str, Any]] = []
    for step in range(6):
        start, work = 10.0 * step, (0 if step < 2 else 1)
        events += [span(f"rollout-{index}", start, start + 5 * work) for index in range(2)]
        for rank, seconds in enumerate((3, 1)):
            events.append(span(f"trainer-{rank}", start + 6, start + 6 + seconds * work))
        events.append(STEP | {"time": start + 10, "step": step, "started": start, "ended": start + 10})
    config = Config(placement="shared", max_staleness=1)
    found = summarise(config, [], events, {"wall_seconds": 60.0})
    steady = device_time(tracks(events), (20.0, 50.0))
    assert found["efficiency"] == pytest.approx(1 - steady["idle"]) == pytest.approx(0.7)
    assert found["devices"] == device_time(tracks(events), (0.0, 60.0))
    separate = summarise(Config(), [], events, {"wall_seconds": 60.0})["devices"]
    assert separate == dict.fromkeys(found["devices"]), "the keys are there"
    assert found["bound"] == pytest.approx({"generation": 5.0, "update": 2.0, "seconds_per_step": 7.0})


def recorded(config: Config, timing: Timing) -> list[Event]:
    """Events of a toy run in virtual time, with spans of what its processes computed."""
    history = shared_virtual(config, timing).observer.events
    parts = {"generate": "rollout"} | dict.fromkeys((*TRAINING, *ENDING), "trainer")
    spans = [
        span(f"{parts[e['kind']]}-{e['worker'].rpartition('-')[2]}", e["start"], e["time"])
        for e in history
        if e["event"] == "computed"
    ]
    return sorted([*history, *spans], key=lambda event: float(event["time"]))


@pytest.mark.extended
@pytest.mark.parametrize(("k", "least", "most"), [(0, 0.05, 0.3), (1, 0.0, 0.01)])
def test_three_devices_with_ten_uneven_tickets_wait_for_each_other_only_on_policy(
    k: int, least: float, most: float
) -> None:
    """At K = 0 two devices have nothing to do while the third makes the last ticket of the step; K = 1 has others."""
    config = shared_config(k, 3, steps=10, prompts_per_step=10, reward__num_workers=4)
    timing = Timing(generate=1.0, score=0.01, update=0.25, spread=0.3)
    events = recorded(config, timing)
    steps = [event for event in events if event["event"] == "step"]
    found = device_time(tracks(events), (steps[2]["started"], steps[-3]["ended"]))
    assert least <= found["idle"] <= most
