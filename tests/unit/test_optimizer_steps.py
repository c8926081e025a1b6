"""Tests of the loop's optimizer steps: ranks share the groups, and a sum that overflows is made again."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from async_flowrl.training.messages import TrainRequest
from async_flowrl.types import Prompt, Scores, Trajectory
from tests.support.run_checks import STEPS
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import Timing
from tests.support.toy_reward import ToyReward
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


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_without_spread_can_be_dropped_with_their_kl(
    hand_over: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is then over the rows that are trained, known when the last group has come."""
    divisors: dict[int, int | None] = {}
    add_up, score = ToyTrainer.add_up, ToyReward.score

    def counting(trainer: ToyTrainer, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        divisors[request.step] = request.rows
        return add_up(trainer, request, *trajectories)

    def flat(reward: ToyReward, terms: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        found = score(reward, terms, prompt, *images)
        if prompt.index % 2:
            return found
        return Scores((0.5,) * len(found.total), {name: (0.5,) * len(found.total) for name in found.by_term})

    monkeypatch.setattr(ToyTrainer, "add_up", counting)
    monkeypatch.setattr(ToyReward, "score", flat)
    trained: dict[str, dict[int, int]] = {}
    for rule in ("count", "drop"):
        changes = {"algorithm__zero_std_groups": rule, "algorithm__kl_coef": 0.1, "trainer__num_workers": ranks}
        found = virtual(toy_config(1, hand_over=hand_over, **changes))
        groups = {
            (step, group) for worker in found.groups["trainer"].workers for step, group, _ in worker.target.trained
        }
        trained[rule] = Counter(step for step, _ in groups)
        assert found.digest and len(found.observer.of("fetched")) == STEPS * ranks
        if rule == "count":
            assert set(divisors.values()) == {None} and set(trained[rule].values()) == {4}
    per_group = 4 * (toy_config().rollout.num_inference_steps - 1)
    assert divisors == {step: trained["drop"][step] * per_group for step in range(STEPS)}
    assert 0 < sum(trained["drop"].values()) < 4 * STEPS


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

    def overflowing(trainer: ToyTrainer, request: TrainRequest) -> int | None:
        if trainer.step == 2 and trainer.plan.update == updates - 1 and len(refused) < 2:
            refused.append(trainer.sum.account.count)
            return -50
        return add_up(trainer, request)

    monkeypatch.setattr(ToyTrainer, "add_up", overflowing)
    found = virtual(config, SHAKEN)
    assert refused == [4 // updates] * 2 and found.digest == calm.digest
    assert len(found.trained) == len(calm.trained) + sum(refused)
    assert "step 2: the sum of its gradients could exceed the range of multiples of 2^-50" in caplog.text
