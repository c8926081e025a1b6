"""Tests of the files that grow during a run: events, metrics, and the ledger of every worker's time."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_flowrl.observability.events import EventLog, effective, read_events
from async_flowrl.observability.ledger import STATES, PoolLedger
from async_flowrl.observability.metrics import MetricsLog


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_events_are_flushed_within_a_second_of_the_next_one_and_steps_at_once(tmp_path: Path) -> None:
    """A run killed right after a checkpoint goes on from it: the history before it must not have a gap."""
    clock, path = Clock(), tmp_path / "events.jsonl"
    log = EventLog(path, clock)
    log.event("ticket", ordinal=0, step=0, state="PENDING")
    assert list(read_events(path)) == []
    clock.now += 1.0
    log.event("ticket", ordinal=0, step=0, state="RUNNING", worker="rollout-0")
    assert [event["state"] for event in read_events(path)] == ["PENDING", "RUNNING"]
    log.event("step", step=0, started=1.0, ended=2.0)
    assert [event["time"] for event in read_events(path)] == [1000.0, 1001.0, 1001.0]
    log.close()


def test_a_line_cut_short_by_a_kill_is_dropped_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1, "event": "step", "step": 0}\n{"time": 2, "ev')
    assert [event["step"] for event in read_events(path)] == [0]
    with closing(EventLog(path, Clock())) as log:
        log.event("step", step=1)
    assert [event["step"] for event in read_events(path)] == [0, 1]


def test_a_rollback_takes_back_what_was_not_saved() -> None:
    def ticket(ordinal: int, step: int, state: str) -> dict[str, object]:
        return {"event": "ticket", "ordinal": ordinal, "step": step, "state": state}

    history = [
        ticket(0, 0, "TRAINED"),
        {"event": "step", "step": 0},
        {"event": "version", "version": 1},
        ticket(1, 1, "TRAINED"),
        {"event": "step", "step": 1},
        {"event": "version", "version": 2},
        ticket(2, 2, "READY"),
        {"event": "fault", "worker": "rollout-0"},
    ]
    again = [ticket(1, 1, "TRAINED"), {"event": "step", "step": 1}]
    counted = effective([*history, {"event": "rollback", "step": 1}, *again])
    assert [e["ordinal"] for e in counted if e["event"] == "ticket"] == [0, 1]
    assert [e["step"] for e in counted if e["event"] == "step"] == [0, 1]
    assert [e["version"] for e in counted if e["event"] == "version"] == [1]
    assert [e["event"] for e in counted if e["event"] in ("fault", "rollback")] == ["fault", "rollback"]


@pytest.mark.extended
@given(
    moves=st.lists(
        st.tuples(
            st.floats(0, 10),
            st.sampled_from(["rollout-0", "rollout-0.1", "rollout-1", "trainer-0"]),
            st.sampled_from([*STATES, "gone", "wait_work"]),
        ),
        max_size=40,
    )
)
def test_every_instant_of_every_place_is_in_one_state(moves: list[tuple[float, str, str]]) -> None:
    clock = Clock()
    ledger = PoolLedger(clock, ["rollout-0", "rollout-1", "trainer-0"])
    laps = []
    for seconds, worker, state in moves:
        clock.now += seconds
        ledger.enter(worker, state)
        laps.append(ledger.lap())
    clock.now += 1.0
    laps.append(ledger.lap())
    for pool, seconds_by_state in ledger.totals().items():
        assert sum(seconds_by_state.values()) == pytest.approx(clock.now - 1000.0)
        for state, value in seconds_by_state.items():
            assert value == pytest.approx(sum(lap[pool][state] for lap in laps), abs=1e-6)


def test_the_ledger_books_states_to_the_right_pool() -> None:
    clock = Clock()
    ledger = PoolLedger(clock, ["rollout-0", "rollout-1"])
    ledger.enter("rollout-0", "busy")
    clock.now += 4.0
    ledger.enter("rollout-0", "gone")
    ledger.enter("rollout-0.1", "sync")
    clock.now += 2.0
    totals = ledger.totals()["rollout"]
    assert (totals["busy"], totals["sync"], totals["idle"]) == (2.0, 1.0, 3.0)
    assert ledger.wall_seconds == 6.0


def test_metrics_are_cut_back_and_go_on(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(5):
        log.append(step, {"step": step, "loss": float("nan") if step == 1 else step / 2})
    log.truncate(3)
    log.append(3, {"loss": 9.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 0, "loss": 0.0}, {"step": 1, "loss": None}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 9.0},
    ]  # fmt: skip
    assert MetricsLog(tmp_path / "metrics.jsonl").read() == lines
