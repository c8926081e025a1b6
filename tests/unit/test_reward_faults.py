"""Tests of a reward that dies, hangs, fails or answers nonsense: equal weights, a skipped group, or a named error."""

from typing import Any

import pytest

from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.config.scoring_pools import RewardPool, reward_pools, workers_key
from async_flowrl.tickets.table import State
from async_flowrl.types import Prompt, Scores
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.run_checks import STEPS
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import ListObserver, ToyPool, once
from tests.support.toy_reward import ToyReward, toy_scores
from tests.unit.faulty_runs import always, check_recovered, disturbed


@pytest.mark.extended
@pytest.mark.parametrize("what", ["kill", "hang", "raise", "nan", "count"])
def test_a_reward_that_fails_once_is_asked_again(what: str) -> None:
    found = disturbed(once("reward-0", "score", 3, what))
    check_recovered(found)
    (fault,) = found.observer.of("fault")
    kinds = {"kill": "WorkerDied", "hang": "DeadlineExceeded"}
    assert fault["kind"] == kinds.get(what, "WorkerFailed")
    assert found.groups["reward"].replaced == (what in kinds)
    if what in ("nan", "count"):
        assert "RewardError" in fault["message"] and "must return 4 finite numbers" in fault["message"]


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raise", WorkerFailed, "raised RuntimeError: injected"),
        ("nan", WorkerFailed, "raised RewardError: reward 'color' on prompt 'prompt 0' must return 4 finite numbers"),
        ("count", WorkerFailed, r"raised RewardError: .*got shape \[3\]"),
        ("hang", DeadlineExceeded, "score: train ticket 0 .* was not done within its deadline of 30 s"),
        ("kill", WorkerDied, r"reward-0\.\d+ died: killed during score"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_by_name(what: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        disturbed(always("reward-0", "score", what), data__shuffle=False)


def test_retries_of_a_reward_back_off() -> None:
    observer = ListObserver()
    config = toy_config(1, steps=STEPS, reward__backoff=0.5, reward__retries=3)
    with pytest.raises(WorkerFailed):
        virtual(config, fault=always("reward-0", "score", "raise"), observer=observer)
    first: dict[str, list[float]] = {}
    for event in observer.of("injected"):
        first.setdefault(event["worker"], []).append(event["time"])
    times = [e["time"] for e in observer.of("fault")]
    assert len(times) >= 4
    own = [times[0], times[0] + 0.6, times[0] + 0.6 + 1.1, times[0] + 0.6 + 1.1 + 2.1]
    assert all(any(abs(t - o) < 0.11 for t in times) for o in own)


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("result", [[1.0, 2.0, 3.0, float("nan")], [1.0], None])
def test_groups_whose_reward_cannot_be_had_are_skipped_if_asked(
    result: object, hand_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt of five never gets a score: its groups leave a gap and the run goes on."""
    score = ToyReward.score

    def unlucky(self: ToyReward, terms: Any, prompt: Prompt, *images: Any) -> Scores:
        return score(self, terms, prompt, *images) if prompt.index != 2 else toy_scores("color", prompt, result, 4)

    monkeypatch.setattr(ToyReward, "score", unlucky)
    found = virtual(toy_config(1, hand_over=hand_over, steps=STEPS, reward__on_error="skip", reward__retries=1))
    counts = found.table.counts()
    skipped = found.observer.of("skipped")
    assert len(skipped) > 0
    assert (counts[State.SKIPPED], counts[State.TRAINED]) == (len(skipped), found.table.issued - len(skipped))
    assert len(found.trained) == counts[State.TRAINED]
    assert sum(line.get("tickets_skipped", 0) for line in found.lines) == len(skipped)
    assert found.staleness() == [min(step, 1) for step in range(STEPS)]


JUDGE = "reward/judge"


def two_terms(judges: int | None = 1) -> Config:
    """The toy run with a second term, which has a pool of its own unless `judges` is None."""
    config = toy_config(hand_over="stream")
    config.reward.terms["judge"] = RewardTerm(weight=0.5, workers=judges)
    return config


def test_a_term_that_says_anything_of_workers_has_a_pool_of_its_own() -> None:
    config = RewardConfig(num_workers=3, gpus_per_worker=0.25, threads=2)
    config.terms = {
        "a": RewardTerm(),
        "b": RewardTerm(workers=1),
        "c": RewardTerm(),
        "d": RewardTerm(gpus_per_worker=0),
    }
    assert reward_pools(config) == (
        RewardPool("reward", ("a", "c"), 3, 0.25, 2),
        RewardPool("reward/b", ("b",), 1, 0.25, 2),
        RewardPool("reward/d", ("d",), 3, 0.0, 2),
    )
    assert [workers_key(pool.name) for pool in reward_pools(config)][:2] == [
        "reward.num_workers",
        "reward.terms.b.workers",
    ]
    alone = RewardConfig(terms={"b": RewardTerm(threads=4)})
    assert [pool.name for pool in reward_pools(alone)] == ["reward/b"]


def held_out(**seat: Any) -> Config:
    """The toy run with two evaluations by a trained and two held-out terms, one of which may have seats."""
    config = toy_config(steps=6, evaluate__every=3)
    config.evaluate.reward.terms = {"own": RewardTerm(**seat), "other": RewardTerm()}
    return config


def test_a_held_out_term_with_seats_is_scored_there_and_nowhere_else() -> None:
    shared, own = calm_run(held_out()), virtual(held_out(workers=2))
    assert own.digest == shared.digest
    assert sorted(own.groups) == ["held_out/own", "reward", "rollout", "trainer"]
    by_term = [{place: scores.by_term for place, scores in each.held_out.items()} for each in own.evaluated]
    assert len(by_term) == 2 and all(scores.keys() == {"own", "other"} for each in by_term for scores in each.values())
    assert by_term == [{place: scores.by_term for place, scores in each.held_out.items()} for each in shared.evaluated]
    assert calls_of(own, "held_out/own") == 4
    assert calls_of(own, "reward") == calls_of(shared, "reward")


def calls_of(run: ToyRun, pool: str) -> int:
    return sum(worker.calls["score"] for worker in run.groups[pool].everybody)


def test_a_held_out_terms_pool_that_cannot_be_filled_again_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the only node with a place for it has gone."""
    replaced = ToyPool.replace

    async def no_seat(pool: ToyPool, index: int) -> Any:
        if pool.workers[index].name.startswith("held_out/"):
            pool.workers[index].kill()
            raise DeadlineExceeded("replacing held_out/own-0", 5.0)
        return await replaced(pool, index)

    monkeypatch.setattr(ToyPool, "replace", no_seat)
    found = virtual(held_out(workers=1), fault=once("held_out/own-0", "score", 2, "kill"))
    assert found.digest == calm_run(held_out()).digest
    assert [event["kind"] for event in found.observer.of("fault")] == ["WorkerDied", "PoolLost"]
    scored = [scores for each in found.evaluated for scores in each.held_out.values()]
    assert all("other" in scores.by_term for scores in scored)
    said = [scores.failed["own"] for scores in scored if "own" in scores.failed]
    assert len(said) == len(scored) - 1 and all(
        "its worker had no replacement: DeadlineExceeded" in why.reason for why in said[1:]
    )


def test_a_dead_worker_of_a_terms_pool_is_replaced_and_only_its_term_is_asked_again() -> None:
    faults = {(f"{JUDGE}-0", "score", 2): "kill", (f"{JUDGE}-0.1", "score", 3): "raise"}
    found = virtual(two_terms(), fault=lambda *call: faults.get(call))
    assert sorted(found.groups) == ["reward", JUDGE, "rollout", "trainer"]
    assert found.digest == calm_run(two_terms(judges=None)).digest != calm_run(toy_config(hand_over="stream")).digest
    assert (found.groups[JUDGE].replaced, found.groups["reward"].replaced) == (1, 0)
    assert [event["worker"] for event in found.observer.of("fault")] == [f"{JUDGE}-0", f"{JUDGE}-0.1"]
    assert calls_of(found, JUDGE) == calls_of(found, "reward") + 2
