"""Tests of both ways to hand groups over: the same weights, and a stream trains while others of its step are made."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.support.float_sum import FloatSum
from tests.support.run_checks import STEPS
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Timing
from tests.support.toy_trainer import ToyTrainer
from tests.unit.loop_runs import SHAKEN, TICKETS_PER_STEP, run


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
