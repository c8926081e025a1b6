"""Tests of the watchdog: a run in which nothing happens reports what waits, and ends with a named error."""

from typing import Any

import pytest

from async_flowrl.controller.watchdog import Stalled, StallRow, limit, stall_report
from async_flowrl.tickets.table import Ticket, TicketTable
from tests.support.toy import ListObserver, Timing, toy_config, virtual


def test_tickets_that_nobody_may_run_end_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(table: TicketTable, worker: str, **how: Any) -> Ticket | None:
        return None

    monkeypatch.setattr(TicketTable, "next_for", closed)
    observer = ListObserver()
    config = toy_config(1)
    with pytest.raises(Stalled, match=r"train ticket 0 \(step 0, group 0, version 0, PENDING"):
        virtual(config, observer=observer)
    stalls = observer.of("stall")
    assert stalls[0]["seconds"] == pytest.approx(config.deadlines.stall)
    assert stalls[-1]["seconds"] > limit(config)


def test_a_slow_run_is_not_a_stalled_one() -> None:
    observer = ListObserver()
    virtual(toy_config(1, steps=2), Timing(generate=25.0, update=5.0), observer=observer)
    assert not [event for event in observer.of("stall") if event["seconds"] > 30]


def test_stall_report_shows_the_oldest_first() -> None:
    rows = [
        StallRow("step 3 group 1", "RUNNING", "rollout-0", 2.0, "denoise 4/10"),
        StallRow("step 3 group 0", "SCORING", "reward-1", 61.5, "call sent"),
    ]
    lines = stall_report(rows).splitlines()
    assert lines[0].split() == ["ticket", "state", "worker", "age", "last", "event"]
    assert lines[1].startswith("step 3 group 0") and "61.5 s" in lines[1]
    assert "and 1 more" in stall_report(rows, most=1)
    assert stall_report([]) == "nothing is under way"
