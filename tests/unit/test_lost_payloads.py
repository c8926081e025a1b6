"""Tests of images and trajectories that are lost before they are used: their tickets are made again."""

import pytest

from tests.support.run_checks import STEPS, check_bound
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import Timing, once
from tests.unit.faulty_runs import calm, check_recovered, disturbed


@pytest.mark.parametrize(
    ("what", "state", "k", "hand_over"),
    [
        ("lose-images", "SCORING", 0, "batch"),
        ("lose-images", "SCORING", 1, "stream"),
        ("lose-images", "SCORING", 3, "batch"),
        ("lose-trajectory", "HANDED", 0, "stream"),
        ("lose-trajectory", "HANDED", 1, "batch"),
        ("lose-trajectory", "HANDED", 3, "stream"),
    ],
)
def test_a_lost_payload_is_made_again(what: str, state: str, k: int, hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k, hand_over=hand_over)
    check_recovered(found, k)
    ordinal = next(e["ordinal"] for e in found.tickets("PENDING") if e["attempt"] == 1)
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=ordinal)]
    assert history[history.index(state, 1) + 1] == "PENDING"
    assert history.count("RUNNING") == 2
    assert found.observer.of("fault")[0]["kind"] == "RefLost"


@pytest.mark.parametrize(("k", "ranks"), [(0, 1), (1, 2), (3, 1), (3, 2)])
def test_a_trajectory_lost_before_the_proximal_predictions_is_made_again(k: int, ranks: int) -> None:
    """With several updates per batch the trainer looks at the later groups first, before its first update."""
    changes = {"trainer__updates_per_batch": 2, "trainer__num_workers": ranks, "rollout__num_workers": 1}
    found = disturbed(once("rollout-0", "generate", 7, "lose-trajectory"), k, **changes)
    (fault,) = found.observer.of("fault", kind="RefLost")
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=6)]
    assert history.count("RUNNING") == 2 and history[history.index("HANDED") + 1] == "PENDING"
    others = [e["state"] for e in found.observer.of("ticket", kind="train", step=1) if e["time"] <= fault["time"]]
    assert others.count("HANDED") == 4 and "TRAINED" not in others
    trainers = found.groups["trainer"].workers
    trained = sorted(each for worker in trainers for each in worker.target.trained)
    assert [group for step, group, _ in trained if step == 1] == [0, 1, 2, 3] and len(trained) == 4 * STEPS
    assert sum(worker.calls["proximal"] for worker in trainers) == 2 * STEPS + 1
    check_bound(found, k)
    assert found.digest == calm(k, trainer__updates_per_batch=2).digest != calm(k).digest


@pytest.mark.parametrize(("seed", "number"), [(2, 6), (3, 4), (5, 3), (8, 3)])
def test_a_trajectory_is_made_again_while_another_trainer_rank_comes_to_its_group(seed: int, number: int) -> None:
    """So few groups that ranks share them, and delays that let a rank come to a group while it has no payloads."""
    changes = {"ticket_size": 1, "trainer__micro_batch_size": 2, "trainer__num_workers": 2, "prompts_per_step": 2}
    config = toy_config(1, hand_over="stream", steps=3, **changes)
    timing = Timing(seed=seed, spread=0.9, update=2.0, slow={"trainer-1": 2.0})
    found = virtual(config, timing, once("rollout-0", "generate", number, "lose-trajectory"))
    assert found.observer.of("fault", kind="RefLost")
    assert found.digest == calm_run(config).digest
