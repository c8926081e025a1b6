"""Tests of the real controller in virtual time: bounds, equalities, order, back-pressure and overlap."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from async_flowrl.controller.context import Context
from async_flowrl.tickets.table import EVALUATION
from async_flowrl.training.messages import StepPlan, Summed, TrainRequest
from tests.support.float_sum import FloatSum
from tests.support.run_checks import STEPS, check_bound, check_evaluation, check_once, check_watermarks
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Timing, ToyPool
from tests.support.toy_trainer import ToyTrainer

MODES = {"sync": (0, "batch"), "stream": (0, "stream"), "one_step_off": (1, "batch"), "fully_async": (3, "stream")}
MODE = pytest.mark.parametrize("mode", MODES)
SHAKEN = Timing(seed=7, spread=0.9, slow={"rollout-1": 3.0})
TICKETS_PER_STEP = 4


def run(mode: str = "one_step_off", *, timing: Timing | None = None, **changes: Any) -> ToyRun:
    k, hand_over = MODES[mode]
    return calm_run(toy_config(k, hand_over=hand_over, steps=STEPS, **changes), timing)


def inverted(found: ToyRun) -> bool:
    """Whether some training ticket was finished before one with a lower ordinal."""
    order = [event["ordinal"] for event in found.tickets("SCORING")]
    return order != sorted(order)


def sample_log(found: ToyRun) -> list[tuple[Any, ...]]:
    """Every trained ticket with the weights it was made with, and the reward of every step."""
    trained = [(e["ordinal"], e["version"], e["digest"]) for e in found.tickets("TRAINED")]
    return [*trained, *((line["reward/mean"], line["reward/std"]) for line in found.lines)]


def check_outstanding(found: ToyRun, k: int) -> None:
    """Tickets begun and not yet trained never exceed max_staleness + 1 steps, and come to that."""
    begun: set[int] = set()
    most = 0
    for event in found.observer.of("ticket", kind="train"):
        if event["state"] == "RUNNING":
            begun.add(event["ordinal"])
        elif event["state"] == "TRAINED":
            begun.discard(event["ordinal"])
        most = max(most, len(begun))
    assert most == min(k + 1, STEPS) * TICKETS_PER_STEP


@MODE
def test_staleness_is_exactly_the_smaller_of_step_and_k(mode: str) -> None:
    check_bound(run(mode), MODES[mode][0])


@MODE
def test_staleness_does_not_depend_on_timing(mode: str) -> None:
    for timing in (SHAKEN, Timing(update=0.01), Timing(generate=0.01), Timing(transfer=3.0)):
        check_bound(run(mode, timing=timing), MODES[mode][0])


@MODE
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_weights_do_not_depend_on_workers_or_delays(mode: str, workers: int) -> None:
    calm = run(mode, rollout__num_workers=1)
    timing = Timing(seed=workers, spread=0.9, slow={f"rollout-{workers - 1}": 3.0})
    shaken = run(mode, timing=timing, rollout__num_workers=workers, reward__num_workers=workers)
    assert not inverted(calm)
    assert inverted(shaken) == (workers > 1), "the disturbance did not happen"
    assert shaken.digest == calm.digest
    assert shaken.published() == calm.published()
    assert sample_log(shaken) == sample_log(calm)
    assert {event["worker"] for event in shaken.tickets("RUNNING")} == {f"rollout-{i}" for i in range(workers)}


@pytest.mark.parametrize("k", [0, 1, 3])
def test_batch_and_stream_make_the_same_weights(k: int) -> None:
    batch, stream = (calm_run(toy_config(k, hand_over=how), SHAKEN) for how in ("batch", "stream"))
    assert batch.digest == stream.digest
    assert batch.observer.of("ticket", state="HANDED") != stream.observer.of("ticket", state="HANDED")
    if k == 0:
        assert stream.seconds < batch.seconds


def test_the_engines_are_compared_in_ten_steps_and_then_in_every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: dict[int, bool] = {}
    begin = ToyTrainer.begin

    def seen(self: ToyTrainer, step: int, plan: StepPlan) -> None:
        replays[step] = plan.replay
        begin(self, step, plan)

    monkeypatch.setattr(ToyTrainer, "begin", seen)
    virtual(toy_config(1, steps=22))
    assert [step for step, replay in replays.items() if replay] == [*range(11), 20]


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


def test_a_late_group_does_not_hold_up_those_behind_it() -> None:
    """One prompt takes as long as the training of the others of its step: its images are all that is waited for."""
    timing, config = Timing(generate=0.1, slow_prompts={"prompt 0": 30.0}), {"rollout__num_workers": 4}
    batch, stream = (virtual(toy_config(0, hand_over=how, **config), timing) for how in ("batch", "stream"))
    assert stream.digest == batch.digest
    assert any(e["group"] == 0 for e in stream.tickets("RUNNING"))
    assert stream.seconds < 0.8 * batch.seconds


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


def test_a_slow_trainer_rank_gets_less_to_do() -> None:
    timing = Timing(generate=0.01, slow={"trainer-1": 4.0})
    found = virtual(toy_config(0, trainer__num_workers=2, prompts_per_step=10, steps=4), timing)
    quick, slow = ([s for s, _, _ in worker.target.trained] for worker in found.groups["trainer"].workers)
    assert quick.count(0) == slow.count(0) == 5, "nothing was measured yet"
    assert quick.count(3) == 8 and slow.count(3) == 2
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


@MODE
def test_weights_change_from_version_to_version_and_between_seeds_and_modes(mode: str) -> None:
    found = run(mode)
    digests = found.published()
    assert len(set(digests.values())) == len(digests) == STEPS + 1
    assert run(mode, seed=1).digest != found.digest
    assert len({run(other).digest for other in MODES}) == 3  # sync and stream agree


@MODE
def test_every_group_is_trained_once_in_its_own_step(mode: str) -> None:
    found = run(mode, timing=SHAKEN)
    assert inverted(found), "the disturbance did not happen"
    check_once(found)


@MODE
def test_live_bytes_are_what_the_label_says(mode: str) -> None:
    found = run(mode, timing=Timing(seed=3, spread=0.9, transfer=0.7), rollout__num_workers=3)
    received = found.observer.of("span", name="receive")
    busy = [e for e in found.tickets("RUNNING") for r in received if r["start"] < e["time"] < r["end"]]
    assert busy, "no weights arrived while an image was made"
    check_watermarks(found)


@MODE
def test_a_frozen_trainer_stops_generation_at_the_limit(mode: str) -> None:
    k = MODES[mode][0]
    found = run(mode, timing=Timing(update=1000.0, generate=0.1), deadlines__update=1e4)
    check_outstanding(found, k)
    first = found.tickets("TRAINED")[0]["time"]
    limit = min(k + 1, STEPS) * TICKETS_PER_STEP
    started = [e["time"] for e in found.tickets("RUNNING")]
    assert len([t for t in started if t < first]) == limit
    assert started[limit] - first < 0.2, "generation goes on at once when a step is done"


@MODE
def test_evaluation_changes_nothing_and_sees_its_own_version_only(mode: str) -> None:
    plain = run(mode, timing=SHAKEN)
    found = run(mode, timing=SHAKEN, evaluate__every=2, evaluate__before_training=True)
    check_evaluation(found, [0, 2, 4, 6])
    assert found.digest == plain.digest
    assert found.published() == plain.published()
    check_bound(found, MODES[mode][0])
    check_watermarks(found)


class SlowEvaluation(Timing):
    """Evaluation tickets take 12 seconds, training tickets half a second."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        if method == "generate":
            return 12.0 if args[0].kind == EVALUATION else 0.5
        return super().duration(worker, method, call, args)


def test_evaluation_is_no_barrier() -> None:
    """While an evaluation is under way training tickets are started, and steps are finished."""
    found = run("one_step_off", timing=SlowEvaluation(update=0.5), evaluate__every=3, rollout__num_workers=3)
    begun = found.tickets("PENDING", kind="evaluation")[::2]
    ended = found.tickets("TRAINED", kind="evaluation")[::2]
    assert [event["version"] for event in begun] == [3, 6]
    during = [e for e in found.observer.of("step") if begun[0]["time"] < e["started"] < ended[0]["time"]]
    assert during, "training stood still"
    assert [e for e in found.tickets("RUNNING") if begun[0]["time"] < e["time"] < ended[0]["time"]]


def test_an_evaluation_has_a_guaranteed_share() -> None:
    """A pool that is never idle still takes every fourth ticket from it."""
    found = run("fully_async", timing=Timing(update=0.1), evaluate__every=2, rollout__num_workers=1)
    begun, ended = (found.tickets(state, kind="evaluation")[::2] for state in ("PENDING", "TRAINED"))
    for first, last in zip(begun, ended, strict=True):
        others = [e for e in found.tickets("RUNNING") if first["time"] < e["time"] < last["time"]]
        assert len(others) <= 8


def test_a_second_evaluation_waits_for_the_first_and_loses_nothing() -> None:
    timing = Timing(generate=1.0, score=0.1, slow={})
    found = run("one_step_off", timing=timing, evaluate__every=1, rollout__num_workers=1)
    check_evaluation(found, [1, 2, 3, 4, 5, 6])
    alive: set[int] = set()
    for event in found.observer.of("ticket", kind="evaluation"):
        (alive.discard if event["state"] == "TRAINED" else alive.add)(event["version"])
        assert len(alive) <= 1


class SlowReceive(Timing):
    """Weights need long to arrive at one worker; it makes images as fast as the others."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        seconds = super().duration(worker, method, call, args)
        return seconds + 12.0 if (worker, method) == ("rollout-1", "receive") and call > 2 else seconds


def test_one_slow_acknowledgement_stalls_one_worker_only() -> None:
    found = run("sync", timing=SlowReceive())
    both, alone = run("sync"), run("sync", rollout__num_workers=1)
    assert found.digest == both.digest
    late = [e["worker"] for e in found.tickets("RUNNING") if e["step"] >= 1]
    assert late.count("rollout-0") > 3 * late.count("rollout-1")
    assert found.observer.of("step")[-1]["ended"] < alone.observer.of("step")[-1]["ended"]
    slow = [e["time"] for e in found.observer.of("version", worker="rollout-1", state="acknowledged")]
    assert slow[-1] - slow[0] > 12, "the disturbance did not happen"


def test_a_slow_prompt_keeps_its_share() -> None:
    plain = run("fully_async")
    slow = run("fully_async", timing=Timing(slow_prompts={"prompt 0": 10.0}))
    assert inverted(slow), "the disturbance did not happen"
    assert slow.seconds > plain.seconds
    assert slow.digest == plain.digest
    check_once(slow)
    assert {e["attempt"] for e in slow.tickets("RUNNING")} == {1}


@pytest.mark.parametrize(("generate", "update"), [(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)])
def test_one_step_off_takes_the_longer_of_generation_and_training(generate: float, update: float) -> None:
    """4 groups, 2 rollout workers: G = 2 generate, T = 4 update."""
    timing = Timing(generate=generate, update=update, score=0.01, transfer=0.01)
    found, sync = (run(mode, timing=timing) for mode in ("one_step_off", "sync"))
    g, t = 2 * generate, 4 * update
    steady = [event["ended"] - event["started"] for event in found.observer.of("step")][2:-1]
    assert sum(steady) / len(steady) == pytest.approx(max(g, t), rel=0.05)
    in_turn = [event["ended"] - event["started"] for event in sync.observer.of("step")][2:-1]
    assert sum(in_turn) / len(in_turn) == pytest.approx(g + t, rel=0.05)


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


def test_streaming_hides_the_training_of_all_groups_but_the_last() -> None:
    timing = Timing(generate=1.0, update=1.0, score=0.01, transfer=0.01)
    sync, stream = (run(mode, timing=timing, rollout__num_workers=1) for mode in ("sync", "stream"))
    assert stream.seconds < 0.7 * sync.seconds
    assert stream.digest == sync.digest


@MODE
def test_tickets_smaller_than_a_group_make_the_same_weights(mode: str) -> None:
    whole, parts = run(mode, timing=SHAKEN), run(mode, timing=SHAKEN, ticket_size=2)
    assert parts.table.issued == 2 * whole.table.issued
    assert parts.digest == whole.digest
    check_bound(parts, MODES[mode][0])
    check_watermarks(parts)


def test_a_run_can_be_asked_to_stop_after_a_step() -> None:
    async def stop(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        await asyncio.sleep(9.0)
        ctx.stop_requested = lambda: True

    found = virtual(toy_config(1, steps=STEPS), disturb=stop)
    done = len(found.lines)
    assert 0 < done < STEPS
    assert found.digest == calm_run(toy_config(1, steps=done)).digest


def test_every_version_is_acknowledged_by_everybody_before_it_is_served() -> None:
    found = run("fully_async", timing=Timing(seed=5, spread=0.9, transfer=2.0), rollout__num_workers=3)
    acknowledged: dict[str, set[int]] = {}
    for event in found.observer.events:
        if event["event"] == "version" and event["state"] == "acknowledged":
            acknowledged.setdefault(event["worker"], set()).add(event["version"])
        if event["event"] == "ticket" and event["state"] == "RUNNING":
            assert event["version"] in acknowledged[event["worker"]]
    firsts = {e["version"]: e["time"] for e in reversed(found.observer.of("version", state="acknowledged"))}
    lasts = {e["version"]: e["time"] for e in found.observer.of("version", state="acknowledged")}
    assert any(lasts[v] - firsts[v] > 0.5 for v in firsts), "all acknowledged at once: nothing was tested"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_has_its_next_ticket_while_it_makes_one(workers: int, mode: str) -> None:
    """Never a third; and whoever has nothing is served before another gets a second."""
    found = run(mode, rollout__num_workers=workers)
    has: dict[str, set[int]] = defaultdict(set)
    seen = set()
    for event in found.observer.of("ticket", kind="train"):
        if event["state"] == "RUNNING":
            has[event["worker"]].add(event["ordinal"])
            seen.add(len(has[event["worker"]]))
            if len(has[event["worker"]]) == 2:
                assert all(has[worker.name] for worker in found.groups["rollout"].workers)
        elif event["state"] == "SCORING":
            has[event["worker"]].discard(event["ordinal"])
    assert max(seen) == (2 if workers == 1 or MODES[mode][0] > 0 else 1)


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_the_only_rollout_worker_has_its_next_ticket_while_it_makes_one(k: int, hand_over: str) -> None:
    """Also that of the next step, with two tickets per step, once its version is there; so it waits for no call."""
    config = toy_config(k, hand_over=hand_over, steps=STEPS, rollout__num_workers=1, prompts_per_step=2)
    found = virtual(config, Timing(generate=1.0, update=0.3))
    order = [(event["state"], event["ordinal"]) for event in found.observer.of("ticket", kind="train")]
    last = 2 * STEPS - 1
    late = [n for n in range(1, last + 1) if order.index(("RUNNING", n)) > order.index(("SCORING", n - 1))]
    # On-policy, the version of a step's first ticket comes from the step before.
    assert late == (list(range(2, last + 1, 2)) if k == 0 else [])
