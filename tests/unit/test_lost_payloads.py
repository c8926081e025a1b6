"""Tests of images and trajectories that are lost before they are used: their tickets are made again."""

import asyncio
from collections.abc import Mapping

import pytest

from async_flowrl.controller.context import Context
from async_flowrl.tickets.table import State
from tests.support.run_checks import STEPS, check_bound, check_evaluation, check_once
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import Timing, ToyPool, once
from tests.unit.faulty_runs import calm, check_recovered, disturbed


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(("what", "state"), [("lose-images", "SCORING"), ("lose-trajectory", "HANDED")])
def test_a_lost_payload_is_made_again(what: str, state: str, k: int, hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k, hand_over=hand_over)
    check_recovered(found, k)
    ordinal = next(e["ordinal"] for e in found.tickets("PENDING") if e["attempt"] == 1)
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=ordinal)]
    assert history[history.index(state, 1) + 1] == "PENDING"
    assert history.count("RUNNING") == 2
    assert found.observer.of("fault")[0]["kind"] == "RefLost"


def test_a_payload_lost_while_it_waits_for_the_trainer_is_made_again() -> None:
    """One ticket of two in its group; the other comes again with it."""
    hit: list[int] = []

    async def lose(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        while not hit:
            await asyncio.sleep(0.05)
            for ticket in ctx.table.live():
                if ticket.state is State.READY and ticket.step == 3:
                    ticket.payload[1].lost = True
                    hit.append(ticket.ordinal)
                    return

    found = virtual(toy_config(1, steps=STEPS, ticket_size=2), disturb=lose)
    assert hit and found.digest == calm().digest
    assert found.table.retried == 2
    check_once(found)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3])
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


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
def test_a_trajectory_that_one_of_several_trainer_ranks_lacks_is_made_again(hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, "lose-trajectory"), trainer__num_workers=2, hand_over=hand_over)
    assert len(found.observer.of("fault", kind="RefLost")) == 1
    assert found.digest == calm().digest
    trained = sorted(each for worker in found.groups["trainer"].workers for each in worker.target.trained)
    assert [each[:2] for each in trained] == [(step, group) for step in range(STEPS) for group in range(4)]


@pytest.mark.parametrize(("seed", "number"), [(2, 6), (3, 4), (5, 3), (8, 3)])
def test_a_trajectory_is_made_again_while_another_trainer_rank_comes_to_its_group(seed: int, number: int) -> None:
    """So few groups that ranks share them, and delays that let a rank come to a group while it has no payloads."""
    changes = {"ticket_size": 1, "trainer__micro_batch_size": 2, "trainer__num_workers": 2, "prompts_per_step": 2}
    config = toy_config(1, hand_over="stream", steps=3, **changes)
    timing = Timing(seed=seed, spread=0.9, update=2.0, slow={"trainer-1": 2.0})
    found = virtual(config, timing, once("rollout-0", "generate", number, "lose-trajectory"))
    assert found.observer.of("fault", kind="RefLost")
    assert found.digest == calm_run(config).digest


def test_lost_images_of_an_evaluation_are_made_again() -> None:
    def lose(worker: str, method: str, number: int) -> str | None:
        return "lose-images" if method.startswith("generate") and number % 4 == 0 else None

    found = disturbed(lose, evaluate__every=2, evaluate__before_training=True)
    assert any(e["method"] == "generate/evaluation" for e in found.observer.of("injected"))
    check_evaluation(found, [0, 2, 4, 6])
    check_recovered(found)
    pictures = [[image.tolist() for image in result.images] for result in found.evaluated]
    plain = calm(evaluate__every=2, evaluate__before_training=True)
    assert pictures == [[image.tolist() for image in result.images] for result in plain.evaluated]
