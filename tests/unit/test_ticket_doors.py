"""Tests of what the ticket table refuses: other weights than the ticket's, and steps out of their order."""

import pytest

from async_flowrl.tickets.table import Refused
from tests.unit.ticket_tables import digest, opened, run_ticket, started, table


def test_a_result_with_another_label_is_refused() -> None:
    t = opened()
    ticket = started(t, "w")
    with pytest.raises(Refused, match="labelled version 1"):
        t.generated(ticket, version=1, digest=digest(1), payload=None)


def test_a_result_made_with_other_weights_is_refused() -> None:
    t = opened()
    ticket = started(t, "w")
    with pytest.raises(Refused, match="was made with weights earlier-attempt"):
        t.generated(ticket, version=0, digest="earlier-attempt", payload=None)


@pytest.mark.parametrize("published", ["of another attempt", None])
def test_a_ready_ticket_made_with_other_weights_does_not_pass_the_trainers_door(published: str | None) -> None:
    """It was accepted, and then its version turned out to be another one."""
    t = opened()
    for _ in range(2):
        run_ticket(t, "w")
    t.scored(t.group(0, 0), (1.0,))
    t.published.clear()
    if published is not None:
        t.publish(0, published)
    with pytest.raises(Refused, match="made with weights digest-0, which this run did not publish as version 0"):
        t.hand_over(0, 0)


def test_a_ready_ticket_of_another_version_does_not_pass_the_trainers_door() -> None:
    t = opened()
    ticket = run_ticket(t, "w")
    t.scored(t.group(0, 0), (1.0,))
    for version in (-2, 1):
        ticket.version = version
        with pytest.raises(Refused, match=f"is {-version} versions old; the bound is 1"):
            t.hand_over(0, 0)


def test_an_evaluation_made_with_other_weights_is_refused() -> None:
    t = opened()
    t.acknowledge("w", 0, digest(0), evaluation=True)
    (ticket,) = t.issue_evaluation(version=0, step=0, groups=1)
    t.start(ticket, "w")
    with pytest.raises(Refused, match="was made with weights earlier-attempt"):
        t.generated(ticket, version=0, digest="earlier-attempt", payload=None)


def test_an_acknowledgement_of_other_bytes_is_refused() -> None:
    t = table()
    t.join("w")
    t.publish(0, digest(0))
    with pytest.raises(Refused, match="acknowledged version 0"):
        t.acknowledge("w", 0, "something else")


def test_steps_are_handed_over_in_order_only() -> None:
    t = opened(k=1)
    for _ in range(4):
        run_ticket(t, "w")
    t.scored(t.group(1, 0), (1.0,))
    with pytest.raises(Refused, match="step 0 is due"):
        t.hand_over(1, 0)


def test_a_step_is_closed_only_when_all_of_it_was_handed_over() -> None:
    t = opened()
    run_ticket(t, "w")
    t.scored(t.group(0, 0), (1.0,))
    t.hand_over(0, 0)
    with pytest.raises(Refused, match="cannot be closed"):
        t.close_step(0)
