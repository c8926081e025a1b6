"""Tests of the successor of a dead trainer rank: what it takes over, and the run when it does not come."""

import pytest

from tests.support.toy import calm_run, toy_config, virtual
from tests.unit.dying_ranks import SHAKEN

pytestmark = pytest.mark.usefixtures("ranks_meet")


def test_a_newcomer_keeps_no_version_that_its_peers_have_let_go_of() -> None:
    """An evaluation ends, and its version is let go of, while the newcomer takes over a state that has a copy of it."""
    given = toy_config(1, steps=12, prompts_per_step=4, hand_over="batch", trainer__num_workers=2)
    given.evaluate.every = 1

    def fault(worker: str, method: str, number: int) -> str | None:
        late = {("trainer-1", "train", 2): "kill", ("trainer-1.1", "take_over", 1): "delay"}
        return late.get((worker, method, number))

    found = virtual(given, SHAKEN, fault)
    (rejoined,) = found.observer.of("rejoined")
    assert rejoined["worker"] == "trainer-1.1" and len(found.evaluated) == 12
    first, second = (worker.target.versions.kept for worker in found.groups["trainer"].workers)
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("number", [6, 7, 9])
def test_a_newcomer_is_told_what_its_peer_has_not_done_yet(number: int) -> None:
    """The peer, whose lane is busy, lets go of an evaluated version only after it has handed over its state."""
    given = toy_config(3, steps=14, prompts_per_step=4, hand_over="batch", trainer__num_workers=2)
    given.evaluate.every = 3

    def fault(worker: str, method: str, count: int) -> str | None:
        if (worker, method) == ("trainer-0", "let_go"):
            return "delay"
        return "kill" if (worker, method, count) == ("trainer-1", "train", number) else None

    found = virtual(given, SHAKEN, fault)
    assert found.observer.of("rejoined")
    kept = found.groups["trainer"].workers[1].target.versions.kept
    assert set(kept) == {("policy", 12)}, "that of the last evaluation"


@pytest.mark.parametrize("what", ["kill", "raise", "hang"])
def test_a_successor_that_does_not_come_is_named_and_the_others_go_on(what: str) -> None:
    given = toy_config(1, steps=24, prompts_per_step=4, trainer__num_workers=2, hand_over="batch")
    given.deadlines.load = 5

    def fault(worker: str, method: str, number: int) -> str | None:
        if (worker, method, number) == ("trainer-1", "train", 2):
            return "kill"
        return what if method == "load" and worker in ("trainer-1.1", "trainer-1.2") else None

    found = virtual(given, SHAKEN, fault)
    assert found.digest == calm_run(toy_config(1, steps=24, prompts_per_step=4, hand_over="batch"), SHAKEN).digest
    kinds = {"kill": "WorkerDied", "raise": "WorkerFailed", "hang": "DeadlineExceeded"}
    faults = [(event["worker"], event["kind"]) for event in found.observer.of("fault")]
    assert faults[1:] == [(name, kinds[what]) for name in ("trainer-1.1", "trainer-1.2")]
    assert [event["worker"] for event in found.observer.of("rejoined")] == ["trainer-1.3"]


@pytest.mark.parametrize("successors", [3, 1])
def test_after_some_successors_no_other_is_called(successors: int, caplog: pytest.LogCaptureFixture) -> None:
    given = toy_config(1, steps=24, prompts_per_step=4, trainer__num_workers=2, hand_over="batch")
    if successors != 3:
        given.limits.successors = successors

    def fault(worker: str, method: str, number: int) -> str | None:
        first = (worker, method, number) == ("trainer-1", "train", 2)
        return "kill" if first or (method == "load" and worker.startswith("trainer-1.")) else None

    found = virtual(given, SHAKEN, fault)
    assert not found.observer.of("rejoined") and len(found.observer.of("fault")) == 1 + successors
    assert "no further successor is started" in caplog.text
