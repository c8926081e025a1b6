"""Tests of the ticket table alone: the gate, retries, and what is refused; tests/chaos has random orders of events."""

import pytest

from async_flowrl.tickets.table import Refused, Shape, State, Ticket, TicketTable


def digest(version: int) -> str:
    return f"digest-{version}"


def table(k: int = 1, steps: int = 4, groups: int = 2) -> TicketTable:
    return TicketTable(Shape(1, groups, steps, k))


def opened(k: int = 1, steps: int = 4, groups: int = 2) -> TicketTable:
    """A table whose worker "w" holds version 0."""
    t = table(k, steps, groups)
    t.join("w")
    publish(t, 0, "w")
    return t


def started(t: TicketTable, worker: str) -> Ticket:
    ticket = t.next_for(worker)
    assert ticket is not None
    t.start(ticket, worker)
    return ticket


def run_ticket(t: TicketTable, worker: str) -> Ticket:
    ticket = started(t, worker)
    assert t.generated(ticket, version=ticket.version, digest=digest(ticket.version), payload=ticket.ordinal)
    return ticket


def publish(t: TicketTable, version: int, *workers: str) -> None:
    t.publish(version, digest(version))
    for worker in workers:
        t.acknowledge(worker, version, digest(version))


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_version_zero_opens_exactly_k_plus_one_steps_to_who_has_acknowledged_it(k: int) -> None:
    t = table(k=k, steps=10)
    t.join("w")
    publish(t, 0)
    assert t.next_for("w") is None
    assert t.blocked() == "weights"
    t.acknowledge("w", 0, digest(0))
    steps = []
    while (ticket := t.next_for("w")) is not None:
        t.start(ticket, "w")
        steps.append(ticket.step)
    assert steps == sorted(list(range(k + 1)) * 2)
    assert t.blocked() == "work"


def test_a_worker_is_given_a_second_ticket_only_while_there_are_plenty() -> None:
    """Four workers and eight tickets: the first one taken leaves too few for a second in the same hands."""
    t = table(k=1, groups=4)
    for worker in "abcd":
        t.join(worker)
    publish(t, 0, *"abcd")
    assert t.next_for("a", ahead=True) is t.next_for("a") is not None
    run_ticket(t, "a")
    assert t.next_for("a", ahead=True) is None
    t.lost_worker("d")
    assert t.next_for("a", ahead=True) is t.next_for("a") is not None, "three workers share the seven that are left"


def test_a_dead_workers_ticket_runs_again_and_a_late_result_counts_once() -> None:
    t = table()
    for worker in ("a", "b"):
        t.join(worker)
    publish(t, 0, "a", "b")
    ticket = started(t, "a")
    assert t.lost_worker("a") == [ticket]
    assert ticket.state is State.PENDING
    assert t.next_for("a") is None
    assert t.next_for("b") is ticket
    t.start(ticket, "b")
    assert ticket.attempt == 2
    assert t.generated(ticket, version=0, digest=digest(0), payload="first")
    assert not t.generated(ticket, version=0, digest=digest(0), payload="second")
    assert (ticket.payload, t.duplicates, t.retried) == ("first", 1, 1)


def test_groups_without_scores_are_skipped_and_counted() -> None:
    t = opened()
    run_ticket(t, "w")
    run_ticket(t, "w")
    t.scored(t.group(0, 0), (1.0,))
    t.scored(t.group(0, 1), None)
    for group in (0, 1):
        t.hand_over(0, group)
    t.close_step(0)
    assert (t.finished[State.TRAINED], t.finished[State.SKIPPED]) == (1, 1)


def test_evaluation_has_its_own_slot_and_a_guaranteed_share() -> None:
    t = opened(k=1, groups=8)
    t.issue_evaluation(version=0, step=0, groups=2)
    first = t.next_for("w")
    assert first is not None and first.kind == "train"  # the evaluation slot is still empty
    t.acknowledge("w", 0, digest(0), evaluation=True)
    kinds = [run_ticket(t, "w").kind for _ in range(8)]
    assert kinds.index("evaluation") < 4
    with pytest.raises(Refused, match="still outstanding"):
        t.issue_evaluation(version=0, step=1, groups=1)


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


def test_steps_are_handed_over_in_order_and_whole() -> None:
    t = opened(k=1)
    for _ in range(4):
        run_ticket(t, "w")
    t.scored(t.group(1, 0), (1.0,))
    with pytest.raises(Refused, match="step 0 is due"):
        t.hand_over(1, 0)
    t.scored(t.group(0, 0), (1.0,))
    t.hand_over(0, 0)
    with pytest.raises(Refused, match="cannot be closed"):
        t.close_step(0)
