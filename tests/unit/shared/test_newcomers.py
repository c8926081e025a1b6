"""Tests of a process that joins others which sample and train: its cost for the others, in virtual time."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from checkpoint_engine.errors import WeightsMismatch
from tests.chaos.recovery_schedules import AVERAGES
from tests.support.toy import ToyRun
from tests.support.toy_pool import DELAY_SECONDS, REBUILD_SECONDS, Fault, Timing, once
from tests.support.toy_shared import ToySharedRollout
from tests.unit.shared.runs import check, first, separate, shared

VICTIM, NEWCOMER = "shared-1", "shared-1.1"


def faults(*several: Fault) -> Fault:
    return lambda *call: next((what for one in several if (what := one(*call)) is not None), None)


def units(found: ToyRun, until: float) -> list[tuple[Any, ...]]:
    """What the others have computed until then, and when."""
    computed = [event for event in found.observer.of("computed") if event["worker"] != NEWCOMER]
    return [(e["worker"], e["kind"], e["start"], e["time"]) for e in computed if e["time"] < until]


@pytest.mark.parametrize("mode", ["stream", "one step off", "fully async"])
def test_nobody_waits_while_it_loads(mode: str) -> None:
    """Until it is there, the others compute what they would if it never came, and at the same moments."""
    killed = once(VICTIM, "generate", 3, "kill")

    def loading(what: str) -> ToyRun:
        both = [once(NEWCOMER, "load", number, what) for number in (1, 2)]
        return shared(mode, 3, faults(killed, *both), Timing(seed=7, spread=0.9, update=0.3), deadlines__load=1000.0)

    comes, never = loading("delay"), loading("hang")
    (death,) = comes.observer.of("injected", fault="kill")
    there = death["time"] + REBUILD_SECONDS + DELAY_SECONDS
    assert units(comes, there) == units(never, there)
    during = [unit for unit in units(comes, there) if unit[2] > death["time"] + REBUILD_SECONDS]
    assert {kind.partition("_")[0] for _, kind, _, _ in during} >= {"generate", "train"}
    check(comes, mode)
    (rejoined,) = comes.observer.of("rejoined")
    assert rejoined["time"] >= there and not never.observer.of("rejoined")


@pytest.mark.parametrize("mode", ["one step off", "fully async"])
def test_tickets_are_made_while_it_takes_over(mode: str) -> None:
    """Between two steps nobody has anything to train, but for the newcomer: it takes no turn of anybody's."""
    slow = (first("shared-0", "state", "delay"), first(NEWCOMER, "take_over", "delay"))
    timing = Timing(generate=1.0, update=0.05, score=0.01)
    found = shared(mode, 2, faults(once(VICTIM, "generate", 6, "kill"), *slow), timing)
    check(found, mode)
    (told, took) = (event["time"] for event in found.observer.of("injected", fault="delay"))
    made = [
        event["worker"]
        for event in found.observer.of("computed")
        if event["kind"] == "generate" and told <= event["start"] and event["time"] <= took + DELAY_SECONDS
    ]
    assert "shared-0" in made, "who tells its state samples meanwhile"
    assert NEWCOMER in made, "who takes it over does, too"


@pytest.mark.parametrize("method", ["load", "take_over"])
@pytest.mark.parametrize("what", ["kill", "hang"])
def test_one_that_does_not_come_is_followed_by_another(method: str, what: str) -> None:
    both = faults(once(VICTIM, "generate", 3, "kill"), first(NEWCOMER, method, what))
    found = shared("one step off", 3, both, deadlines__load=5.0)
    check(found, "one step off")
    assert found.observer.of("rejoined")[-1]["worker"] == "trainer-1.2"


def test_it_samples_before_it_trains() -> None:
    """It need not wait for the step under way to be a rollout worker."""
    slow: Callable[..., str | None] = first("shared-0", "take_step", "delay", after=1)
    found = shared("fully async", 2, faults(once(VICTIM, "generate", 3, "kill"), slow))
    check(found, "fully async")
    (rejoined,) = found.observer.of("rejoined")
    earliest = min(e["time"] for e in found.observer.of("computed", worker=NEWCOMER, kind="generate"))
    assert earliest < rejoined["time"]


def test_its_proof_comes_before_its_versions_and_tickets() -> None:
    called: list[str] = []

    def heard(worker: str, method: str, number: int) -> None:
        called.extend([method] * (worker == NEWCOMER))

    check(shared("one step off", 2, faults(once(VICTIM, "generate", 6, "kill"), heard)), "one step off")
    assert called.index("receive") < called.index("prove") < called.index("keep_own") < called.index("generate")


def test_one_that_computes_with_other_modules_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    prove, generate, served = ToySharedRollout.prove, ToySharedRollout.generate, list[str]()

    def elsewhere(self: ToySharedRollout, version: int) -> Any:
        found = prove(self, version)
        return {name: 2.0 * value for name, value in found.items()} if self.name == "rollout-1.1" else found

    def serves(self: ToySharedRollout, request: Any) -> Any:
        served.append(self.name)
        return generate(self, request)

    monkeypatch.setattr(ToySharedRollout, "prove", elsewhere)
    monkeypatch.setattr(ToySharedRollout, "generate", serves)
    with pytest.raises(WeightsMismatch, match=r"layer at rollout-1\.1 "):
        shared("one step off", 2, once(VICTIM, "generate", 6, "kill"))
    assert "rollout-0" in served and "rollout-1.1" not in served


@pytest.mark.parametrize("mode", ["one step off", "fully async"])
def test_it_has_the_averages_of_its_peer(mode: str) -> None:
    """It joins, and then its peer dies: from then on the old policy, the EMA and the versions are its own ones."""
    averaged = {**AVERAGES, "evaluate__every": 1, "evaluate__before_training": True}
    calls = Counter[str]()

    def dies_then(worker: str, method: str, number: int) -> str | None:
        if method != "take_step":
            return None
        calls[worker] += 1
        return "kill" if worker == "shared-0" and calls[NEWCOMER] > 0 else None

    found = shared(mode, 2, faults(once(VICTIM, "generate", 3, "kill"), dies_then), **averaged)
    check(found, mode, **averaged)
    assert [event["worker"] for event in found.observer.of("rejoined")] == ["trainer-1.1", "trainer-0.1"]
    assert {event["worker"] for event in found.observer.of("sender")} == {"trainer-1.1"}
    scores = [{each.version: each.scores for each in run.evaluated} for run in (found, separate(mode, **averaged))]
    assert scores[0] == scores[1] and len(scores[0]) == 7
