"""Tests of the loop's optimizer steps: ranks share the groups, and a sum that overflows is made again."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.training.messages import TrainRequest
from async_flowrl.types import Trajectory
from tests.support.float_sum import FloatSum
from tests.support.run_checks import STEPS
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Timing
from tests.support.toy_reward import score_alike
from tests.support.toy_trainer import ToyTrainer
from tests.unit.loop_runs import SHAKEN, TICKETS_PER_STEP, run


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
    add_up = ToyTrainer.add_up

    def counting(trainer: ToyTrainer, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        divisors[request.step] = request.rows
        return add_up(trainer, request, *trajectories)

    monkeypatch.setattr(ToyTrainer, "add_up", counting)
    score_alike(monkeypatch, lambda prompt: prompt.index % 2 == 0)
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


@pytest.mark.parametrize("k", [0, 1, 3])
def test_batch_and_stream_make_the_same_weights(k: int) -> None:
    batch, stream = (calm_run(toy_config(k, hand_over=how), SHAKEN) for how in ("batch", "stream"))
    assert batch.digest == stream.digest
    assert batch.observer.of("ticket", state="HANDED") != stream.observer.of("ticket", state="HANDED")
    if k == 0:
        assert stream.seconds < batch.seconds


ARRIVALS = [Timing(seed=seed, spread=0.9, slow={f"rollout-{seed % 4}": 3.0}) for seed in range(5)]


def handed_orders(runs: Sequence[ToyRun]) -> int:
    return len({tuple(event["ordinal"] for event in found.tickets("HANDED")) for found in runs})


@pytest.mark.parametrize("k", [0, 1, 3])
def test_groups_are_trained_in_whatever_order_they_get_ready(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also their metrics are the same; and adding floats would not give the same weights."""
    config = toy_config(k, hand_over="stream", rollout__num_workers=4)
    exact = [calm_run(config, timing) for timing in ARRIVALS]
    assert handed_orders(exact) >= 3, "groups always came in the same order"
    assert len({found.digest for found in exact}) == 1
    untimed = [[{n: v for n, v in x.items() if not n.startswith("timing")} for x in found.lines] for found in exact]
    assert all(lines == untimed[0] for lines in untimed)
    monkeypatch.setattr(ToyTrainer, "sum_of_gradients", FloatSum)
    floats = [virtual(config, timing) for timing in ARRIVALS]
    assert handed_orders(floats) >= 3
    assert len({found.digest for found in floats}) > 1


@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 2])
def test_streaming_trains_a_group_while_others_of_its_step_are_made(workers: int) -> None:
    """Each group is handed over in the moment in which it is scored, if the trainer has nothing else to do then.

    A batch waits for its last group. The groups of a step come at least 0.4 s apart, and take 0.25 s to train.
    """
    timing = Timing(generate=1.0, update=0.25, score=0.01, transfer=0.01, slow={"rollout-1": 1.4})
    sync, stream = (run(mode, timing=timing, rollout__num_workers=workers) for mode in ("sync", "stream"))
    assert stream.digest == sync.digest and stream.seconds < sync.seconds
    for record, at_once in ((stream, True), (sync, False)):
        made, scored, handed = (
            {e["ordinal"]: e["time"] for e in record.tickets(state)} for state in ("SCORING", "READY", "HANDED")
        )
        for first in range(0, STEPS * TICKETS_PER_STEP, TICKETS_PER_STEP):
            *earlier, last = sorted(range(first, first + TICKETS_PER_STEP), key=scored.__getitem__)
            apart = [scored[b] - scored[a] for a, b in pairwise([*earlier, last])]
            assert min(apart) > 0.25 + 0.1, "the trainer has something else to do"
            if at_once:
                assert all(handed[each] == scored[each] for each in (*earlier, last))
                assert all(handed[each] < made[last] for each in earlier)
            else:
                assert {handed[each] for each in (*earlier, last)} == {scored[last]}


@pytest.mark.extended
@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("groups", [16, 64])
def test_calls_of_trainer_ranks_do_not_grow_with_groups_times_ranks(hand_over: str, groups: int) -> None:
    """A step ends with two calls of each rank. Of a batch a call has up to eight groups; of a stream, those that are
    ready, so there are never more calls than groups."""
    steps, ranks = 3, 4
    config = toy_config(1, hand_over=hand_over, steps=steps, prompts_per_step=groups, trainer__num_workers=ranks)
    found = virtual(config, Timing(generate=0.01, update=1.0))
    counts = [worker.calls for worker in found.groups["trainer"].workers]
    assert all(each["add_up"] == each["take_step"] == steps for each in counts)
    of_a_rank = -(-groups // (ranks * MAX_GROUPS_PER_CALL)) + 1
    most = steps * (ranks * of_a_rank if hand_over == "batch" else groups - 1)
    assert sum(each["train"] for each in counts) <= most
