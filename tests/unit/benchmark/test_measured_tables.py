"""Tests of the tables of `frame.py`, `start.py` and `placements.py`, on made-up measurements, and of their JSON."""

import json
from typing import Any

import pytest

from tests.performance import placements, start
from tests.performance.bare_process import AS_IT_IS, AS_WORKERS, Steps
from tests.performance.frame import LEAST_STEPS, RUNS, loads, several
from tests.performance.frame_runs import Run
from tests.performance.frame_tables import (
    ASYNC,
    BARE,
    STREAM,
    SYNC_LOCAL,
    SYNC_THREADS,
    Bare,
    Record,
    Taken,
    best,
    from_json,
    goals,
    markdown,
    threads_markdown,
)
from tests.performance.placement_runs import Alone
from tests.performance.placements import SHARED, Measured
from tests.performance.processes import Threads

MACHINE = {"cores": "2", "measured": "2030-01-31"}


def taken(pace: float = 1.0, **changed: Run) -> Taken:
    """A round in which a bare step takes .4 s with one thread and .3 s, twice the CPU, with two; a run takes .5 s."""
    bare = {each.name: Steps(0.4 * each.threads * pace, (0.5 - 0.1 * each.threads) * pace, 10**9) for each in BARE}
    run = Run(0.25 * pace, {"rollout": 0.3 * pace, "driver": 0.2 * pace}, {"rollout": (0.28, 0.02)}, 2 * 10**9)
    return Taken({name: changed.get(name, run) for name in RUNS}, {name: dict(bare) for name in RUNS})


def record(*short: Taken) -> Record:
    return Record("python -m frame", MACHINE, list(short) or [taken()], [taken()])


def cells(text: str, first: str) -> list[str]:
    """The cells of the only row of the tables that begins with `first`."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_ratios_are_to_the_bare_loops_around_a_run() -> None:
    one = taken()
    one.around[ASYNC] = {name: Steps(2 * each.cpu, 2 * each.clock) for name, each in one.around[ASYNC].items()}
    short = markdown(record(one)).partition("Steps of 2 s")[0]
    assert cells(short, f"{ASYNC} | all")[3:] == ["0.625"] * 2
    assert cells(short.partition("by the clock")[2], ASYNC)[2] == "0.417"
    assert cells(short, f"{SYNC_LOCAL} | all")[3:] == ["1.250"] * 2, "its own bare loops were as before"


def test_ratios_are_of_one_round_and_of_as_many_threads() -> None:
    text = markdown(record(taken(1.0), taken(2.0), taken(4.0)))
    short = text.partition("Steps of 2 s")[0]
    (one,) = [line for line in short.splitlines() if line.startswith(f"| {ASYNC} | all")]
    assert one == f"| {ASYNC} | all | 1000 | 1.250 (1.250-1.250) | 1.250 (1.250-1.250) |"
    (two,) = [line for line in short.splitlines() if line.startswith(f"| {SYNC_THREADS} | all")]
    assert "| 0.625 (0.625-0.625) |" in two, "its model has two threads, and so has the bare loop's"
    assert cells(short, f"{ASYNC} | rollout")[2:] == ["600.0", "", ""]
    assert cells(short.partition("by the clock")[2], ASYNC) == [
        ASYNC, "500", "0.833 (0.833-0.833)", "0.833 (0.833-0.833)", "2.00",
    ]  # fmt: skip


def test_spread_is_over_the_rounds() -> None:
    slower = Run(0.5, {"all": 1.0})
    text = goals([taken(), taken(**{STREAM: slower}), taken(**{STREAM: slower})], [taken()])
    (row,) = [line for line in text.splitlines() if line.startswith(f"| clock at .3 s: {STREAM} ÷ {ASYNC},")]
    assert row.endswith("| ≤ 1.1 | 2.000 (1.000-2.000) | **no** |")
    (met,) = [line for line in text.splitlines() if f"{ASYNC} ÷ fastest bare, malloc {AS_IT_IS}" in line]
    assert met.endswith("| ≤ 1 | 0.833 (0.833-0.833) | yes |")


def test_the_fastest_bare_loop_may_have_one_backward_pass() -> None:
    one = taken()
    for around in one.around.values():
        around[Bare(2, AS_WORKERS, whole=True).name] = Steps(0.5, 0.1)
    assert best(AS_WORKERS)(one) == pytest.approx(0.1) and best(AS_IT_IS)(one) == pytest.approx(0.3)
    assert "bare, one backward for all rows, 2 threads, malloc as in workers" in markdown(record(one))


def test_what_is_kept_is_what_was_measured() -> None:
    made = record(taken(1.0), taken(2.0))
    kept = from_json(json.loads(json.dumps(made.as_json())))
    assert markdown(kept) == markdown(made) and threads_markdown(kept) == threads_markdown(made)
    assert cells(threads_markdown(kept), "rollout") == ["rollout", "280.0", "20.0"]


def test_threads_are_counted_from_the_warm_up_on() -> None:
    before = Threads({("rollout", 7): {7: 1.0, 8: 2.0}, ("rollout", 9): {9: 1.0}})
    after = Threads({("rollout", 7): {7: 1.5, 8: 5.0}, ("rollout", 9): {9: 2.0, 10: 0.25}, ("driver", 1): {1: 0.5}})
    assert after.since(before) == {"rollout": (4.0, 0.75), "driver": (0.5, 0.0)}


def test_the_loads_have_every_run_and_too_few_steps_are_refused() -> None:
    given: Any = type("Given", (), {"overrides": ["a=b"], "steps": 3, "long_steps": 4})
    short, long = loads(given)
    assert short.runs == tuple(RUNS) and set(long.runs) < set(RUNS) and long.steps == 4
    with pytest.raises(Exception, match=f"2 is less than {LEAST_STEPS}"):
        several("2")


def test_a_start_is_held_to_its_goals() -> None:
    measured = {"ray": {"driver": 1.0, "all": 3.0, start.CLOCK: 8.5}, "local": {"all": 2.0, start.CLOCK: 4.0}}
    made = {"command": "python -m start", "description": MACHINE, "measured": measured}
    text = start.markdown({**made, "answers": {"quick": 0.25, "slow": 1.25}})
    assert "| to the end of step 1 on Ray, by the clock | ≤ 8 s | 8.50 | **no** |" in text
    assert "| quick | ≤ 1 s of CPU | 0.25 | yes |" in text and "| slow | ≤ 1 s of CPU | 1.25 | **no** |" in text
    assert "| Ray | driver | 1.00 |" in text and "| one process | all | 2.00 |" in text


def test_placements_come_back_from_their_json() -> None:
    run = placements.Run(step_seconds=2.2, workers_cpu=4.0, driver_cpu=0.1, ray_cpu=0.1, took=30.0)
    made = Measured("python -m placements", MACHINE, {"1:1": [Alone(2.0, 2.0)]}, {"1:1": [Alone(2.0, 2.2)]})
    made.runs = {"1:1": {SHARED: [run]}}
    kept = json.loads(json.dumps(placements.as_json(made)))
    text = placements.markdown(placements.from_json(kept))
    assert text == placements.markdown(made)
    assert "| 1:1 | ≤ 1.12 | 1.100 | 1.100 (1.100-1.100) | yes |" in text
    assert kept["rows"][0]["met"] is True
