"""Tests of the loop's optimizer steps: ranks share the groups, and a sum that overflows is made again."""

import pytest

from async_flowrl.training.messages import StepPlan, Summed, TrainRequest
from tests.support.run_checks import STEPS
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import Timing
from tests.support.toy_trainer import ToyTrainer
from tests.unit.loop_runs import SHAKEN, run


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_trainer_ranks_share_the_groups_and_fetch_no_more(hand_over: str, ranks: int) -> None:
    timing = Timing(seed=ranks, spread=0.9)
    changes = {"hand_over": hand_over, "ticket_size": 2, "rollout__num_workers": 4}
    found = virtual(toy_config(1, trainer__num_workers=ranks, **changes), timing)
    trainers = [worker.target for worker in found.groups["trainer"].workers]
    assert {trainer.weights_digest() for trainer in trainers} == {run().digest}
    assert sorted(each for trainer in trainers for each in trainer.trained) == sorted(run().trained)
    assert all(trainer.trained for trainer in trainers)
    fetched = found.observer.of("fetched")
    assert {event["worker"] for event in fetched} == {f"trainer-{rank}" for rank in range(ranks)}
    # Two tickets a group, each on one rank; and before the ranks say that nothing is measured, the probe's on all.
    assert sum(event["tickets"] for event in fetched) == STEPS * 4 * 2 + ranks * 2
    assert len(fetched) == STEPS * ranks


def test_a_slow_trainer_rank_gets_less_of_groups_that_come_one_by_one() -> None:
    timing = Timing(generate=0.01, slow={"trainer-1": 4.0})
    config = toy_config(0, hand_over="stream", trainer__num_workers=2, prompts_per_step=10, steps=4)
    found = virtual(config, timing)
    quick, slow = ([s for s, _, _ in worker.target.trained] for worker in found.groups["trainer"].workers)
    assert quick.count(3) > slow.count(3) > 0
    assert found.digest == virtual(toy_config(0, prompts_per_step=10, steps=4)).digest


@pytest.mark.parametrize(("hand_over", "updates"), [("batch", 1), ("batch", 2), ("stream", 1)])
def test_an_optimizer_step_whose_sum_overflows_is_made_again(
    hand_over: str, updates: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = toy_config(1, hand_over=hand_over, trainer__updates_per_batch=updates)
    calm, add_up, refused = calm_run(config, SHAKEN), ToyTrainer.add_up, []

    def overflowing(trainer: ToyTrainer, request: TrainRequest) -> Summed:
        if trainer.step == 2 and trainer.plan.update == updates - 1 and len(refused) < 2:
            refused.append(trainer.sum._account.count)
            return Summed(-50, ())
        return add_up(trainer, request)

    monkeypatch.setattr(ToyTrainer, "add_up", overflowing)
    found = virtual(config, SHAKEN)
    assert refused == [4 // updates] * 2 and found.digest == calm.digest
    assert len(found.trained) == len(calm.trained) + sum(refused)
    assert "step 2: the sum of its gradients could exceed the range of multiples of 2^-50" in caplog.text


def test_a_larger_exponent_of_zero_is_one_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank answers with it once; nothing is computed again in the refused attempt."""
    config, add_up, refused = toy_config(1), ToyTrainer.add_up, list[int]()

    def overflowing(trainer: ToyTrainer, request: TrainRequest) -> Summed:
        if trainer.step == 2 and not refused:
            refused.append(trainer.sum._account.count)
            return Summed(0, ())
        return add_up(trainer, request)

    calm = calm_run(config, SHAKEN)
    monkeypatch.setattr(ToyTrainer, "add_up", overflowing)
    found = virtual(config, SHAKEN)
    assert len(found.trained) == len(calm.trained) + sum(refused)
    assert not found.observer.of("recomputed")


def test_the_engines_are_compared_in_ten_steps_and_then_in_every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: dict[int, bool] = {}
    begin = ToyTrainer.begin

    def seen(self: ToyTrainer, step: int, plan: StepPlan) -> None:
        replays[step] = plan.replay
        begin(self, step, plan)

    monkeypatch.setattr(ToyTrainer, "begin", seen)
    virtual(toy_config(1, steps=22))
    assert [step for step, replay in replays.items() if replay] == [*range(11), 20]
