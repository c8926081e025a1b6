"""Tests of the rank that sends and writes for the others, when it dies: the next one sends and writes the same."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from async_flowrl.controller.replica_calls import ReplicaCalls
from async_flowrl.training.checkpoint_folder import checkpoint_step, written
from separation.group import WorkerDied
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import ListObserver, Timing, World
from tests.support.toy_recovery import events, rollbacks, run_controller, summary
from tests.unit.dying_ranks import MODES, SHAKEN, check, config, killing

pytestmark = pytest.mark.usefixtures("ranks_meet")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("method", "number"),
    [("train", 3), ("add_up", 3), ("take_step", 3), ("stage", 4), ("seal", 4), ("payload", 4), ("state", 1)],
)
def test_the_first_rank_may_die_wherever_it_is_and_the_next_one_sends_the_same(
    mode: str, method: str, number: int
) -> None:
    """It has stepped or not, has staged, sealed or sent its version; nothing goes back to a checkpoint."""
    deaths = [("trainer-0", method, number)] + [("trainer-2", "train", 1)] * (method == "state")
    found = virtual(config(mode, 3), SHAKEN, killing(*deaths))
    assert len(found.observer.of("injected")) == len(deaths)
    check(found, mode)
    (moved,) = found.observer.of("sender")
    assert (moved["worker"], moved["before"]) == ("trainer-1", "trainer-0")
    if number < 4:
        assert "trainer-0.1" in {event["worker"] for event in found.observer.of("rejoined")}
    staged = [event["version"] for event in found.observer.of("version", state="staged")]
    assert staged == list(range(7)), "each version once"


def test_the_role_goes_from_one_first_rank_to_the_next() -> None:
    deaths = killing(("trainer-0", "train", 2), ("trainer-1", "seal", 2), ("trainer-0.1", "train", 2))
    found = virtual(config("stream", 3), SHAKEN, deaths)
    check(found, "stream")
    moves = [(event["before"], event["worker"]) for event in found.observer.of("sender")]
    assert moves[0] == ("trainer-0", "trainer-1") and len(moves) == 2 and moves[1][0] == "trainer-1"


@pytest.mark.parametrize("method", ["hold", "payload", "train"])
def test_an_evaluated_version_outlives_its_sender(method: str) -> None:
    """With evaluations, whose versions are older than those that are trained on by the time they are sent."""
    given = config("batch", 3)
    given.evaluate.every, given.max_staleness = 2, 0
    calm = config("batch", 1)
    calm.evaluate.every, calm.max_staleness = 2, 0
    number = {"hold": 1, "payload": 5, "train": 5}[method]
    found = virtual(given, SHAKEN, killing(("trainer-0", method, number)))
    expected = calm_run(calm, SHAKEN)
    assert found.observer.of("injected") and len(found.observer.of("sender")) == 1
    assert found.digest == expected.digest and found.published() == expected.published()
    assert [one.means() for one in found.evaluated] == [one.means() for one in expected.evaluated]


def test_an_evaluated_version_outlives_a_successor_that_sends_it() -> None:
    """The successor has made no such version: it takes the copy over from its peer."""
    given, calm = config("batch", 2), config("batch", 1)
    for one in (given, calm):
        one.total_steps, one.evaluate.every, one.max_staleness, one.evaluate.before_training = 20, 16, 0, True

    async def disturb(ctx: Any, groups: Any) -> None:
        seen = ctx.observer.of
        while not seen("evaluation") and ctx.table.step < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["trainer"].workers[1].kill()
        while not seen("rejoined"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["trainer"].workers[0].kill()
        while not seen("sender"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["rollout"].workers[0].kill()

    found, expected = virtual(given, SHAKEN, disturb=disturb), virtual(calm, SHAKEN)
    assert [event["worker"] for event in found.observer.of("sender")] == ["trainer-1.1"]
    assert found.digest == expected.digest
    assert [one.means() for one in found.evaluated] == [one.means() for one in expected.evaluated]


def test_a_canary_that_is_lost_with_its_sender_is_made_by_the_next_rank() -> None:
    async def lose(ctx: Any, groups: Any) -> None:
        while ctx.table.step < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        ctx.weights.proof.canary.payload.lost = True
        groups["rollout"].workers[0].kill()

    found = virtual(config("stream", 2), SHAKEN, killing(("trainer-0", "canary_again", 1)), disturb=lose)
    check(found, "stream")
    assert found.observer.of("injected") and [e["worker"] for e in found.observer.of("sender")] == ["trainer-1"]
    assert [e["worker"] for e in found.observer.of("replaced")] == ["rollout-0", "trainer-0"]


@pytest.mark.parametrize("method", ["canary", "seal", "payload"])
def test_the_first_canary_is_made_by_the_next_rank_if_its_maker_dies(method: str) -> None:
    """Before anything is published there is nothing that another rank would have to send in its place."""
    found = virtual(config("stream", 3), SHAKEN, killing(("trainer-0", method, 1)))
    check(found, "stream")
    assert [event["worker"] for event in found.observer.of("fault")] == ["trainer-0"]
    assert [event["worker"] for event in found.observer.of("rejoined")] == ["trainer-0.1"]
    assert not found.observer.of("sender")


def test_without_a_rank_that_makes_the_first_canary_the_attempt_ends_by_name() -> None:
    with pytest.raises(WorkerDied, match=r"trainer-[01] died"):
        virtual(config("batch", 2), SHAKEN, killing(("trainer-0", "canary", 1), ("trainer-1", "canary", 1)))


def whole_run(root: Path, *deaths: tuple[str, str, int], ranks: int = 2) -> Path:
    """A controller with its checkpoints, one every two steps, in `root`."""
    given = toy_config(1, steps=6, trainer__num_workers=ranks, save__every=2, save__keep=9, monitor__progress=False)
    assert run_controller(given, root, World(Timing(update=0.3), killing(*deaths), ListObserver())) is None
    return root


def checkpoints(root: Path) -> list[tuple[int, bytes]]:
    """Step and weights of every checkpoint."""
    return [
        (checkpoint_step(path), (path / "weights.safetensors").read_bytes())
        for path in reversed(written(root / "checkpoints"))
    ]


@pytest.mark.parametrize(("method", "number"), [("snapshot", 2), ("save", 2), ("save", 4), ("weights_digest", 1)])
def test_a_checkpoint_is_written_by_the_next_rank_if_its_writer_dies(method: str, number: int, tmp_path: Path) -> None:
    found = whole_run(tmp_path / "found", ("trainer-0", method, number))
    calm = whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and [event["worker"] for event in events(found, "fault")] == ["trainer-0"]
    assert checkpoints(found) == checkpoints(calm) and [step for step, _ in checkpoints(found)] == [0, 2, 4, 6]
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]


def test_a_checkpoint_whose_copies_died_is_missed_and_the_next_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = [("trainer-0", "save", 2), ("trainer-1", "save", 1)]
    found, calm = whole_run(tmp_path / "found", *deaths, ranks=3), whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and "checkpoint 2 could not be written (1 in a row)" in caplog.text
    assert checkpoints(found) == [one for one in checkpoints(calm) if one[0] != 2]


def test_a_checkpoint_is_copied_by_ranks_that_do_not_end_together(tmp_path: Path) -> None:
    arrange = ReplicaCalls._arrange

    def in_twos(calls: ReplicaCalls, per_replica: int) -> None:
        arrange(calls, min(2, len(calls.workers.workers)))

    with mock.patch.object(ReplicaCalls, "_arrange", in_twos):
        found = whole_run(tmp_path / "found", ("trainer-0", "save", 2), ranks=4)
    calm = whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and checkpoints(found) == checkpoints(calm)
