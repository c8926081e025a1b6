"""Tests of one process that samples and trains: it never waits for itself, whatever is due, stuck or lost."""

import asyncio
from typing import Any

import pytest

from separation.supervise import DeadlineExceeded
from tests.support.toy import Disturbance
from tests.support.toy_pool import Fault, Timing
from tests.unit.shared.shared_runs import MODES, check, shared

EVALUATED = {"evaluate__every": 1, "evaluate__before_training": True}
AHEAD = [mode for mode, settings in MODES.items() if settings["k"] > 0]


def stuck(first: int, last: float) -> Fault:
    """The reward's calls of these numbers, over all its workers, never end."""
    seen = [0]

    def fault(worker: str, method: str, number: int) -> str | None:
        if not worker.startswith("reward") or method != "score":
            return None
        seen[0] += 1
        return "hang" if first <= seen[0] <= last else None

    return fault


def losing(step: int, payload: int) -> Disturbance:
    """Loses the images (0) or the trajectory (1) of a ticket of `step` while that is trained and step + 1 is made."""

    async def lose(ctx: Any, groups: Any) -> None:
        while True:
            live = [ticket for ticket in ctx.table.live() if ticket.kind == "train"]
            due = [t for t in live if t.step == step == ctx.table.step and t.payload]
            if due and any(t.step == step + 1 and str(t.state) == "RUNNING" for t in live):
                due[-1].payload[payload].lost = True
                return
            await asyncio.sleep(0.05)

    return lose


@pytest.mark.parametrize("mode", MODES)
def test_an_evaluation_is_due_at_every_step(mode: str) -> None:
    found = shared(mode, 1, **EVALUATED)
    check(found, mode, **EVALUATED)
    assert len(found.evaluated) == 7


@pytest.mark.parametrize("mode", AHEAD)
def test_an_evaluation_keeps_its_share_of_a_process_that_always_has_other_tickets(mode: str) -> None:
    """Every fourth ticket is of the evaluation, which has two."""
    found = shared(mode, 1, timing=Timing(generate=1.0, update=0.01, score=0.01), evaluate__every=3)
    given = [(event["time"], kind) for kind in ("train", "evaluation") for event in found.tickets("RUNNING", kind=kind)]
    kinds = [kind for _, kind in sorted(given)]
    places = [place for place, kind in enumerate(kinds) if kind == "evaluation"]
    assert len(places) == 4, "two evaluations, one of them when the training has ended"
    assert places[1] - places[0] == 4
    begun = found.tickets("PENDING", kind="evaluation")[0]["time"]
    assert sum(begun < time < sorted(given)[places[0]][0] for time, _ in given) <= 4


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_is_stuck_and_comes_back(mode: str) -> None:
    """It is asked again; what can be sampled and trained meanwhile is."""
    found = shared(mode, 1, stuck(5, 6), deadlines__score=5.0, reward__retries=3)
    check(found, mode)
    assert len(found.observer.of("injected")) == 2
    assert found.groups["reward"].replaced == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_is_stuck_for_good_ends_the_run_by_name(mode: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"score: .* was not done within its deadline of 5 s"):
        shared(mode, 1, stuck(5, float("inf")), deadlines__score=5.0, reward__retries=2)


@pytest.mark.parametrize("payload", [0, 1], ids=["images", "trajectory"])
@pytest.mark.parametrize("mode", AHEAD)
def test_a_payload_of_a_step_is_lost_while_the_next_is_made(mode: str, payload: int) -> None:
    """The ticket is made again by the only worker, before those of the next step that it was given ahead."""
    found = shared(mode, 1, disturb=losing(2, payload))
    check(found, mode)
    assert found.table.retried == 1


@pytest.mark.parametrize("mode", AHEAD)
def test_all_of_it_at_once(mode: str) -> None:
    found = shared(mode, 1, stuck(12, 13), disturb=losing(2, 1), deadlines__score=5.0, reward__retries=3, **EVALUATED)
    check(found, mode, **EVALUATED)
    assert len(found.evaluated) == 7 and found.table.retried == 1
