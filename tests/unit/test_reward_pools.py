"""Tests of reward terms with pools of their own: scores, the cost of a slow judge, and the messages about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.pools import RewardPool, held_out_by_pool, reward_pools, scoring_pools, section_of, workers_key
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.observability.bottleneck import reward_bound, verdict
from async_flowrl.observability.summary import configured_pools
from async_flowrl.observability.timeline import tracks
from async_flowrl.report.document import document
from separation.group import WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.recorded import recorded
from tests.support.toy import Timing, ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import ToyPool, once

JUDGE = "reward/judge"


def two_terms(k: int = 1, *, judges: int | None = 1, steps: int = 6, **changes: Any) -> Config:
    """The toy run with a second term, which has a pool of its own unless `judges` is None."""
    config = toy_config(k, steps=steps, hand_over="stream", **changes)
    config.reward.terms["judge"] = RewardTerm(weight=0.5, workers=judges)
    return config


def slow_judge(seconds: float, workers: int = 4) -> Timing:
    """Scores of the judge's pool take so long, those of the shared pool .01 s."""
    slow = {f"{JUDGE}-{index}": seconds / 0.01 for index in range(workers)}
    return Timing(generate=0.5, score=0.01, update=0.25, transfer=0.01, slow=slow)


def seconds_per_step(run: ToyRun) -> float:
    ends = [event["ended"] for event in run.observer.of("step")]
    return float(ends[-2] - ends[2]) / (len(ends) - 4)


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


def test_held_out_terms_have_pools_of_their_own_or_that_of_the_first_pool() -> None:
    config = toy_config(reward__num_workers=3, reward__threads=2)
    alone, with_others = RewardTerm(gpus_per_worker=0.5), RewardTerm(name="color")
    config.evaluate.reward.terms = {"a": alone, "b": with_others}
    *trained, own = scoring_pools(config)
    assert (tuple(trained), own) == (reward_pools(config.reward), RewardPool("held_out/a", ("a",), 3, 0.5, 2))
    assert (section_of(own.name), workers_key(own.name)) == (
        "evaluate.reward.terms.a",
        "evaluate.reward.terms.a.workers",
    )
    assert held_out_by_pool(config) == {"held_out/a": {"a": alone}, "reward": {"b": with_others}}
    assert configured_pools(config)["held_out/a"] == (3, 0.5)
    config.reward.terms["color"].workers = 1
    assert held_out_by_pool(config)["reward/color"] == {"b": with_others}


@pytest.mark.parametrize("section", ["reward.terms", "evaluate.reward.terms"])
def test_more_than_one_gpu_is_a_whole_number(section: str) -> None:
    config = toy_config()
    where = config.evaluate.reward if section.startswith("evaluate") else config.reward
    where.terms["color"] = RewardTerm(gpus_per_worker=1.5)
    key = section.replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"(?<!\.){key}\.color\.gpus_per_worker above 1 must be a whole number"):
        check(config)


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
    assert [calls_of(own, pool, "score_held_out") for pool in ("held_out/own", "reward")] == [4, 4]
    assert calls_of(own, "held_out/own", "score") == 0 < calls_of(own, "reward", "score")


def calls_of(run: ToyRun, pool: str, method: str) -> int:
    return sum(worker.calls.get(method, 0) for worker in run.groups[pool].everybody)


def test_a_dead_worker_of_a_held_out_terms_pool_is_replaced_and_the_others_go_on() -> None:
    found = virtual(held_out(workers=1), fault=once("held_out/own-0", "score_held_out", 1, "kill"))
    assert found.digest == calm_run(held_out()).digest and found.groups["held_out/own"].replaced == 1
    assert [event["worker"] for event in found.observer.of("fault")] == ["held_out/own-0"]
    assert all(not scores.failed for each in found.evaluated for scores in each.held_out.values())


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
    found = virtual(held_out(workers=1), fault=once("held_out/own-0", "score_held_out", 2, "kill"))
    assert found.digest == calm_run(held_out()).digest
    assert [event["kind"] for event in found.observer.of("fault")] == ["WorkerDied", "PoolLost"]
    scored = [scores for each in found.evaluated for scores in each.held_out.values()]
    assert all("other" in scores.by_term for scores in scored)
    said = [scores.failed["own"] for scores in scored if "own" in scores.failed]
    assert len(said) == len(scored) - 1 and all(
        "its worker had no successor: DeadlineExceeded" in why for why in said[1:]
    )


def test_the_weights_do_not_depend_on_which_pool_scores_a_term() -> None:
    shared, own = virtual(two_terms(judges=None)), virtual(two_terms(judges=2), slow_judge(0.7))
    assert sorted(shared.groups) == ["reward", "rollout", "trainer"]
    assert sorted(own.groups) == ["reward", JUDGE, "rollout", "trainer"]
    assert own.digest == shared.digest != calm_run(toy_config(hand_over="stream")).digest
    scored = [event["worker"] for event in own.observer.of("state", state="busy")]
    assert {f"{JUDGE}-0", f"{JUDGE}-1", "reward-0"} <= set(scored)


def test_a_dead_worker_of_a_terms_pool_is_replaced_and_only_its_term_is_asked_again() -> None:
    faults = {(f"{JUDGE}-0", "score", 2): "kill", (f"{JUDGE}-0.1", "score", 3): "raise"}
    found = virtual(two_terms(), fault=lambda *call: faults.get(call))
    assert found.digest == calm_run(two_terms()).digest
    assert (found.groups[JUDGE].replaced, found.groups["reward"].replaced) == (1, 0)
    assert [event["worker"] for event in found.observer.of("fault")] == [f"{JUDGE}-0", f"{JUDGE}-0.1"]
    calls = sum(worker.calls["score"] for worker in found.groups["reward"].everybody)
    asked_again = sum(worker.calls["score"] for worker in found.groups[JUDGE].everybody)
    assert asked_again == calls + 2


def test_a_term_that_always_fails_skips_the_group_or_ends_the_run_as_on_error_says() -> None:
    def fails(worker: str, method: str, number: int) -> str | None:
        return "raise" if worker.startswith(JUDGE) and number == 5 else None

    config = two_terms(reward__retries=0)
    with pytest.raises(WorkerFailed, match="reward/judge-0"):
        virtual(config, fault=fails)
    config.reward.on_error = "skip"
    found = virtual(config, fault=fails)
    assert len(found.observer.of("skipped")) == 1
    assert sum(line.get("tickets_skipped", 0) for line in found.lines) == 1


def test_a_slow_judge_costs_latency_until_it_is_the_bottleneck() -> None:
    """Generation takes 1 s per step of four groups, so one judge is in time with 0.2 s a group, not with 0.6 s."""
    fast, late = calm_run(two_terms(steps=16), slow_judge(0.01)), calm_run(two_terms(steps=16), slow_judge(0.2))
    limit = calm_run(two_terms(steps=16), slow_judge(0.6))
    assert seconds_per_step(late) == pytest.approx(seconds_per_step(fast), rel=0.03)
    assert seconds_per_step(limit) == pytest.approx(4 * 0.6, rel=0.03)
    assert late.seconds > fast.seconds
    assert sentence(fast) is sentence(late) is None
    said = sentence(limit)
    assert said is not None and said.startswith("Reward-bound: the worker of the pool reward/judge was busy ")
    assert said.endswith("; reward.terms.judge.workers=3 would be enough.")
    told = verdict(tracks(limit.observer.events), limit.observer.events, placement="separate")
    assert told.startswith("Reward-bound: the worker of the pool reward/judge was busy "), "the report says it"
    assert sentence(virtual(two_terms(judges=3, steps=16), slow_judge(0.6))) is None


def test_the_page_warns_of_rewards_that_limit_the_speed_before_anything_else(tmp_path: Path) -> None:
    late, limit = calm_run(two_terms(steps=16), slow_judge(0.2)), calm_run(two_terms(steps=16), slow_judge(0.6))
    (enough,) = document([recorded(tmp_path / "enough", late, two_terms(steps=16))])["runs"]
    root = recorded(tmp_path / "limit", limit, two_terms(steps=16))
    (root / "summary.json").write_text(json.dumps({"steps": 16, "warnings": ["careful"]}))
    (found,) = document([root])["runs"]
    assert not any("Reward-bound" in each["text"] for each in enough["warnings"])
    assert [each["text"] for each in found["warnings"]] == [found["bottleneck"], "careful"]
    assert found["warnings"][0]["level"] == "warning"
    assert found["bottleneck"].endswith("; reward.terms.judge.workers=3 would be enough.")


def sentence(run: ToyRun) -> str | None:
    """What the report would begin with, for the middle of the run."""
    steps = run.observer.of("step")
    return reward_bound(tracks(run.observer.events), (steps[3]["started"], steps[-3]["ended"]))
