"""Tests of the planner's recommendations, and of the durations that it learns from a run."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.plan import __main__ as plan
from async_flowrl.plan.advise import advise
from async_flowrl.plan.calibrate import NothingToLearn, calibrate
from async_flowrl.plan.laws import Law
from async_flowrl.plan.limits import Limits
from async_flowrl.plan.placements import NO_LAYOUT
from async_flowrl.plan.prediction import predicted_against_actual
from async_flowrl.plan.simulate import simulate
from async_flowrl.plan.work import Layout, Work
from tests.support.recorded import recorded
from tests.support.toy import Timing, ToyRun, toy_config, virtual

SLOW = pytest.mark.slow


def work(g: float, t: float, *, groups: int = 8, cv: float = 0.05, **more: Any) -> Work:
    return Work(groups, Law(g / groups, cv), Law(t / groups, 0.05), **more)


def few(devices: int, **more: Any) -> Limits:
    """Fewer steps than a plan simulates by default; for the work of these tests the advice is the same."""
    return Limits(devices, steps=12, **more)


@pytest.mark.parametrize(
    ("g", "t", "split"),
    [
        (12, 4, (6, 2)),
        (2, 6, (2, 6)),
        pytest.param(8, 8, (4, 4), marks=SLOW),
        pytest.param(7, 1, (7, 1), marks=SLOW),
    ],
)
def test_the_split_follows_the_work(g: float, t: float, split: tuple[int, int]) -> None:
    advice = advise(work(g, t, groups=16, cv=0.0), few(8, share=False))
    assert advice.chosen is not None
    assert (advice.chosen.layout.rollout, advice.chosen.layout.trainer) == split


def test_any_number_of_ranks_is_recommended() -> None:
    advice = advise(work(4, 12, group_size=4), few(8, share=False))
    assert advice.chosen is not None
    assert advice.chosen.layout.trainer == 6


def test_the_smallest_staleness_that_reaches_the_bound() -> None:
    even = advise(work(1, 1), few(2, share=False)).chosen
    uneven = advise(work(1, 1, groups=4, cv=2.0), Limits(2, share=False, steps=80)).chosen
    assert even is not None
    assert uneven is not None
    assert (even.layout.max_staleness, even.layout.hand_over) == (1, "stream")
    assert even.efficiency >= 0.98
    assert uneven.layout.max_staleness >= 2


def test_on_policy_is_enough_where_training_is_next_to_nothing() -> None:
    chosen = advise(work(8, 0.02), few(2, share=False)).chosen
    assert chosen is not None
    assert chosen.layout.max_staleness == 0


def test_trainer_bound_runs_are_told_that_more_is_pure_staleness() -> None:
    advice = advise(work(0.5, 1), few(2, share=False))
    assert any("More max_staleness than" in s and "the trainer is the limit" in s for s in advice.sentences)


def test_the_search_for_staleness_ends_where_the_bound_is_reached() -> None:
    """Also where every depth reaches it: generation takes no time, so that nothing has to be hidden."""
    advice = advise(work(0.001, 4, cv=0.0), few(2, share=False))
    assert {prediction.layout.max_staleness for prediction in advice.depths} == {0, 1, 2}


def test_dont_use_async_here() -> None:
    """Nothing to hide and an uneven split: phases in turn use both devices all the time."""
    advice = advise(work(2, 1, cv=0.0, group_size=2), few(2))
    assert advice.sentences[0].startswith("Don't use async here")
    assert advise(work(2, 2), few(1)).sentences[0].startswith("Don't use async here")


def test_worth_it_where_rewards_and_publishing_would_be_waited_for() -> None:
    advice = advise(work(2, 2, cv=0.3, score=Law(0.1), deliver=Law(0.3)), few(2))
    assert advice.sentences[0].startswith("Worth it")
    in_turn = advice.placements.in_turn
    assert in_turn is not None and in_turn.layout.placement == "shared"
    assert advice.chosen is not None
    assert in_turn.step_seconds > 1.15 * advice.chosen.step_seconds


def test_one_pool_is_recommended_where_no_split_fits_and_rewards_take_their_time() -> None:
    """3 : 1 on two devices with a reward of 6 s: (30 + 10)/2 with one pool, 30 with two, 26 with phases in turn.

    A unit of work more or less in the last step is a tenth of a second per step here, so there are some more steps.
    """
    advice = advise(work(30, 10, groups=16, cv=0.0, group_size=4, score=Law(6.0)), Limits(2, steps=18, reward=16))
    best = advice.placements.best
    assert best is not None
    assert (best.layout.placement, best.layout.max_staleness) == ("shared", 1)
    assert best.step_seconds == pytest.approx(20.0, rel=0.02)
    assert advice.chosen is not None and advice.chosen.step_seconds == pytest.approx(30.0, rel=0.03)
    assert advice.sentences[0].startswith("Worth it: 1.")
    assert any(s.startswith("One pool that does both is 1.") for s in advice.sentences)
    use = next(s for s in advice.sentences if s.startswith("Use "))
    assert "--config-name one_step_off placement=shared rollout.num_workers=2 trainer.num_workers=2" in use
    assert any(s.startswith("If the pools have to be separate: ") for s in advice.sentences)


def test_in_turn_is_compared_with_the_fastest_that_overlaps() -> None:
    """One pool that overlaps takes 10 s, too; two pools at 3 : 1 take 15 s."""
    advice = advise(work(15, 5), few(2))
    found = advice.placements
    assert found.best is found.in_turn and found.overlapping is found.shared_overlap is not None
    assert found.separate is not None and found.overlapping.step_seconds < 0.8 * found.separate.step_seconds
    assert re.search(r"overlaps them \(placement=shared, max_staleness=\d\) 10\S* s", advice.sentences[0])


def test_two_pools_stay_where_a_split_fits() -> None:
    advice = advise(work(20, 20, cv=0.0, group_size=4, score=Law(6.0)), few(2, reward=16))
    best = advice.placements.best
    assert best is not None and best is advice.chosen
    assert any(s.startswith("Two pools are as fast") for s in advice.sentences)


def test_one_device_hides_the_reward_with_one_pool() -> None:
    advice = advise(work(30, 10, cv=0.0, group_size=4, score=Law(8.0)), few(1, reward=16))
    best = advice.placements.best
    assert best is not None and best.layout.placement == "shared" and best.layout.max_staleness == 1
    assert advice.chosen is None
    assert advice.sentences[0].startswith("Worth it: 1.2") and "on the same 1 device " in advice.sentences[0]
    alone = advise(work(30, 10, cv=0.0, group_size=4), few(1))
    assert "placement=shared" in alone.sentences[0] and alone.sentences[0].startswith("Don't use async here")
    without = advise(work(30, 10, cv=0.0, group_size=4, score=Law(8.0)), few(1, reward=16, share=False))
    assert without.placements.shared == () and without.placements.best is None
    assert without.sentences == (NO_LAYOUT,)


def test_memory_bounds_what_may_wait() -> None:
    heavy = work(1, 1, ticket_bytes=1000)
    assert advise(heavy, few(2, memory=100, share=False)).chosen is None
    roomy = advise(heavy, few(2, memory=40_000, share=False)).chosen
    assert roomy is not None
    assert roomy.payload_bytes <= 40_000


def test_whole_devices_cost() -> None:
    advice = advise(work(2, 1, cv=0.0), few(2, share=False))
    assert any(s.startswith("Whole devices cost 25%") for s in advice.sentences)


def test_uneven_work_that_no_staleness_evens_out() -> None:
    advice = advise(work(1, 1, groups=2, cv=4.0), Limits(2, share=False, steps=60))
    assert advice.chosen is not None
    assert any("reaches 98% of the bound" in s for s in advice.sentences) == (advice.chosen.efficiency < 0.98)


def seconds_per_step(run: ToyRun, k: int) -> float:
    ends = [event["ended"] for event in run.observer.of("step")]
    return (ends[len(ends) - 1 - k] - ends[1]) / (len(ends) - 2 - k)


@pytest.mark.parametrize(
    ("slow", "others"),
    [
        ({}, [(2, "batch", 2)]),
        ({"rollout-0": 2.0}, [(1, "stream", 3)]),
        pytest.param({}, [(0, "stream", 2), (1, "stream", 3)], marks=SLOW),
        pytest.param({"rollout-0": 2.0}, [(0, "batch", 2), (1, "stream", 2)], marks=SLOW),
    ],
)
def test_calibrated_on_policy_it_predicts_other_depths_and_splits(
    tmp_path: Path, slow: dict[str, float], others: list[tuple[int, str, int]]
) -> None:
    """`others`: (max_staleness, hand_over, rollout workers)."""
    timing = Timing(generate=1.0, score=0.3, update=0.5, transfer=0.2, spread=0.3, slow=slow)
    config = toy_config(0, steps=24, rollout__num_workers=2, prompts_per_step=8)
    learnt = calibrate(recorded(tmp_path / "run", virtual(config, timing), config))
    assert learnt.layout.slow == (() if not slow else pytest.approx((2.0, 1.0), rel=0.15))
    for k, hand_over, workers in others:
        real = virtual(
            toy_config(k, hand_over=hand_over, steps=24, rollout__num_workers=workers, prompts_per_step=8), timing
        )
        layout = Layout(workers, 1, 1, k, hand_over, learnt.layout.slow)
        predicted = simulate(learnt.work, layout, steps=24).step_seconds
        assert predicted == pytest.approx(seconds_per_step(real, k), rel=0.06), (k, hand_over, workers)


def test_predicted_against_actual(tmp_path: Path) -> None:
    timing = Timing(generate=1.0, score=0.1, update=0.5, spread=0.2)
    config = toy_config(1, hand_over="stream", steps=40)
    compared = predicted_against_actual(recorded(tmp_path / "run", virtual(config, timing), config))
    assert compared is not None
    assert abs(compared["deviation"]) < 0.05
    assert compared["sentence"].startswith(f"predicted {compared['predicted']['step_seconds']:.3g} s per step")


def test_a_run_that_was_resumed_late_is_compared_from_there_on(tmp_path: Path) -> None:
    """As if the 24 recorded steps were the last of 100: the run was resumed at step 76."""
    config = toy_config(1, steps=24)
    directory = recorded(tmp_path / "run", virtual(config), config)
    whole = predicted_against_actual(directory)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    later = [event | {"step": event["step"] + 76} if "step" in event else event for event in events]
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    resumed = [{"event": "rollback", "step": 76, "time": 0.0}, *later]
    configured = (directory / "config.yaml").read_text()
    (directory / "config.yaml").write_text(configured.replace("total_steps: 24", "total_steps: 100"))
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in resumed))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(x | {"step": x["step"] + 76}) + "\n" for x in lines))
    compared = predicted_against_actual(directory)
    assert whole is not None and compared is not None
    assert compared["learnt_from_steps"] == [first + 76 for first in whole["learnt_from_steps"]]
    assert compared["predicted"] == pytest.approx(whole["predicted"], rel=0.01)
    assert compared["actual"] == whole["actual"]


def test_a_run_is_compared_from_a_thread_of_its_own_controller(tmp_path: Path) -> None:
    """The virtual clock lives in that thread; the controller's loop goes on meanwhile."""
    config = toy_config(0, steps=16)
    directory = recorded(tmp_path / "run", virtual(config), config)

    async def controller() -> Any:
        return await asyncio.to_thread(predicted_against_actual, directory)

    compared = asyncio.run(controller())
    assert abs(compared["deviation"]) < 0.05


def test_a_run_too_short_to_tell(tmp_path: Path) -> None:
    config = toy_config(1, steps=4)
    directory = recorded(tmp_path / "run", virtual(config), config)
    assert predicted_against_actual(directory) is None
    with pytest.raises(NothingToLearn, match="no step from"):
        calibrate(directory, last=1)


def test_a_run_that_no_plan_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--from-run", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_one_pool_is_left_out_where_the_run_would_be_refused_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = toy_config(1, steps=16)
    run = virtual(config)
    config.trainer.shard = "full"
    folder = recorded(tmp_path / "run", run, config)
    assert plan.main(["--from-run", str(folder), "--devices", "2", "--steps", "12"]) == 0
    printed = capsys.readouterr()
    assert (
        "one pool that does both is left out: placement=shared samples with the base that it trains on" in printed.err
    )
    assert "placement=shared" not in printed.out


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--generate", "8", "--update", "8", "--devices", "4", "--sync", "0.1", "--prompts", "8", "--steps", "12"]
    assert plan.main([*given, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["chosen"]["rollout"] == printed["chosen"]["trainer"] == 2
    separate = ["--split", "1:1", "--no-shared", "--prompts", "4", "--steps", "12"]
    assert plan.main(["--generate", "8", "--update", "8", *separate]) == 0
    shown = capsys.readouterr().out
    assert "Use --config-name one_step_off rollout.num_workers=1 trainer.num_workers=1" in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--update 8", "--generate and --update"),
        ("--generate 8 --update 8 --ticket-size 5", "--ticket-size 5 must divide --group-size 16"),
        ("--generate 8 --update 8 --evaluate-every 5", "--evaluate-every needs --evaluation"),
    ],
)
def test_what_the_command_refuses(arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(arguments.split()) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--generate -1", "--generate nan", "--split 5", "--devices 0", "--serial 2"])
def test_numbers_that_mean_nothing_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan.main(arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err
