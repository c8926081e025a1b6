"""Tests of the watchdog: a run in which nothing happens reports what waits, and ends with a named error."""

from typing import Any

import pytest

from async_flowrl.controller.deadlines import SeparatePools
from async_flowrl.controller.watchdog import Stalled, limit
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
    assert stalls[-1]["seconds"] > limit(config, SeparatePools(config))


def test_a_slow_run_is_not_a_stalled_one() -> None:
    observer = ListObserver()
    virtual(toy_config(1, steps=2), Timing(generate=25.0, update=5.0), observer=observer)
    assert not [event for event in observer.of("stall") if event["seconds"] > 30]
