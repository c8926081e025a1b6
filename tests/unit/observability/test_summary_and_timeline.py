"""Tests of intervals, the trace, and the numbers of summary.json, on a run whose times are known."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_flowrl.config.schema import Config
from async_flowrl.observability.events import Event
from async_flowrl.observability.intervals import intersect, length, subtract, union
from async_flowrl.observability.summary import mfu, summarise
from async_flowrl.observability.timeline import lanes, trace, write_timeline

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=12)


def instants(intervals: list[Any]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


@pytest.mark.extended
@given(one=INTERVALS, other=INTERVALS)
def test_interval_arithmetic_is_set_arithmetic(one: list[Any], other: list[Any]) -> None:
    left, right = union(one), union(other)
    assert instants(left) == instants(one)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(left))
    assert instants(intersect(left, right)) == instants(one) & instants(other)
    assert instants(subtract(left, right)) == instants(one) - instants(other)
    assert length(left) == len(instants(one))


def made_up(steps: int, generation: float, update: float, max_staleness: int, workers: int = 1) -> Iterator[Event]:
    """A run in which each step's generation is split evenly over the workers; times are exact."""
    ended: dict[int, float] = {}
    generated = trained = 100.0
    for step in range(steps):
        needed = ended.get(step - max_staleness - 1, 100.0) if step > max_staleness else 100.0
        start = max(generated, needed)
        for index in range(workers):
            worker = f"rollout-{index}"
            if start > generated:
                yield {"time": generated, "event": "state", "worker": worker, "state": "idle"}
            yield {"time": start, "event": "state", "worker": worker, "state": "busy"}
            generated_at = start + generation / workers
            yield {
                "time": generated_at, "event": "span", "worker": worker, "name": "generate", "start": start,
                "end": generated_at,
            }  # fmt: skip
        generated = start + generation / workers
        began = max(trained, generated)
        if began > trained:
            yield {"time": trained, "event": "state", "worker": "trainer-0", "state": "wait_data"}
        yield {"time": began, "event": "state", "worker": "trainer-0", "state": "busy"}
        end = began + update
        yield {"time": end, "event": "span", "worker": "trainer-0", "name": "forward", "start": began, "end": end}
        yield {"time": end, "event": "step", "step": step, "started": trained, "ended": end}
        trained = ended[step] = end


def metrics(steps: int, max_staleness: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": step / 10,
            "staleness/max": min(step, max_staleness),
            "staleness/mean": float(min(step, max_staleness)),
            "images": 32,
        }
        for step in range(steps)
    ]


def summary(steps: int, generation: float, update: float, max_staleness: int, workers: int = 1) -> dict[str, Any]:
    config = Config(max_staleness=max_staleness)
    events = list(made_up(steps, generation, update, max_staleness, workers))
    counted = {"wall_seconds": 50.0, "weights_digest": "digest"}
    return summarise(config, metrics(steps, max_staleness), events, counted)


def test_sync_has_no_overlap_and_the_efficiency_of_taking_turns() -> None:
    found = summary(20, generation=2.0, update=1.0, max_staleness=0)
    assert found["overlap"] == {"seconds": 0, "share": 0}
    assert found["bound"] == pytest.approx({"generation": 2.0, "update": 1.0, "seconds_per_step": 2.0})
    assert found["efficiency"] == pytest.approx(2 / 3)
    assert found["steady_images_per_s"] == pytest.approx(32 / 3)


def test_one_step_off_overlaps_fully_in_the_steady_state() -> None:
    found = summary(20, generation=2.0, update=1.0, max_staleness=1)
    assert found["overlap"]["share"] == pytest.approx(1.0)
    assert found["overlap"]["seconds"] == pytest.approx(19.0)
    assert found["efficiency"] == pytest.approx(1.0)
    assert found["steady_images_per_s"] == pytest.approx(16.0)


def test_the_bound_counts_workers() -> None:
    found = summary(20, generation=2.0, update=0.5, max_staleness=1, workers=2)
    assert found["bound"]["generation"] == pytest.approx(1.0)
    assert found["efficiency"] == pytest.approx(1.0)


def test_totals_of_the_summary() -> None:
    found = summary(20, generation=2.0, update=1.0, max_staleness=1)
    assert (found["steps"], found["images"], found["images_per_s"]) == (20, 640, 12.8)
    assert (found["staleness_max"], found["staleness_mean"], found["staleness_updates_max"]) == (1, 0.95, 1)
    assert (found["reward_first"], found["reward_last"]) == pytest.approx((0.05, 1.85))
    assert found["workers"] == {"rollout": 1, "trainer": 1, "reward": 1}
    assert found["weights_digest"] == "digest" and found["memory"] == {}
    json.dumps(found, allow_nan=False)
    resumed = [*made_up(20, 2.0, 1.0, 1, 1), *({"event": e, "time": 999.0, "step": 20} for e in ("rollback", "inputs"))]
    after = summarise(Config(max_staleness=1), metrics(20, 1), resumed, {"wall_seconds": 50.0})
    assert (after["steps"], after["images"], after["images_per_s"]) == (20, 640, None)
    lines = [line | {"memory/trainer": 3.5 + line["step"] % 2, "memory/rollout": 2.0} for line in metrics(3, 1)]
    counted = summarise(Config(max_staleness=1), lines, list(made_up(3, 2.0, 1.0, 1, 1)), {"wall_seconds": 50.0})
    assert counted["memory"] == {"trainer": 4.5, "rollout": 2.0}


def test_flops_are_those_of_the_steady_state_and_a_share_of_the_peak() -> None:
    events = list(made_up(20, 2.0, 1.0, 1, 2))
    for event in events:
        if event["event"] == "span" and event["worker"].startswith("rollout"):
            event["flops"] = 6e9
    known = summarise(Config(max_staleness=1), metrics(20, 1), events, {"wall_seconds": 50.0}, 60e9)
    assert set(known["flops_per_s"]) == {"rollout"}
    assert known["mfu"]["rollout"] == pytest.approx(known["flops_per_s"]["rollout"] / 60e9)
    # Two workers, one ticket each per step, whose generation takes a second of a step of one.
    assert known["mfu"]["rollout"] == pytest.approx(0.1, rel=0.1)
    unknown = summarise(Config(max_staleness=1), metrics(20, 1), events, {"wall_seconds": 50.0})
    assert unknown["mfu"] == {"rollout": None}
    assert mfu(known) == f"rollout {known['mfu']['rollout']:.1%}"
    assert mfu(unknown) == mfu({}) == ""


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_run_too_short_for_a_steady_state_says_null(steps: int) -> None:
    found = summary(steps, generation=2.0, update=1.0, max_staleness=1)
    assert found["efficiency"] is None
    assert found["overlap"]["share"] is None
    json.dumps(found, allow_nan=False)


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=25)


@pytest.mark.extended
@given(spans=SPANS)
def test_spans_within_a_lane_are_apart(spans: list[tuple[int, int]]) -> None:
    events = [{"start": start, "end": start + size} for start, size in spans]
    placed = lanes(events)
    assert sorted(map(str, (span for lane in placed for span in lane))) == sorted(map(str, events))
    for lane in placed:
        for i, a in enumerate(lane):
            for b in lane[i + 1 :]:
                assert a["end"] <= b["start"] or b["end"] <= a["start"]


def test_the_trace_has_one_named_track_per_worker(tmp_path: Path) -> None:
    events = [*made_up(4, 2.0, 1.0, 1), {"time": 101.0, "event": "version", "version": 1, "state": "staged"}]
    found = trace(events)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "thread_name"}
    assert sorted(names.values()) == ["rollout-0", "trainer-0"]
    blocks = [e for e in found if e["ph"] == "X" and names[e["tid"]] == "trainer-0" and e["name"] == "forward"]
    assert [(e["ts"], e["dur"]) for e in blocks] == [(2e6, 1e6), (4e6, 1e6), (6e6, 1e6), (8e6, 1e6)]
    assert [e["name"] for e in found if e["ph"] == "i" and "version" in e["name"]] == ["version 1 staged"]
    source, target = tmp_path / "events.jsonl", tmp_path / "timeline.json"
    source.write_text("".join(json.dumps(event) + "\n" for event in events))
    write_timeline(source, target)
    assert json.loads(target.read_text())["traceEvents"] == found
