"""Tests of attempts that end and of the next ones: dead trainer ranks, killed controllers, failing checkpoints."""

import asyncio
import json
import logging
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.config.sections.runtime import LimitsConfig
from async_flowrl.controller.checkpoints import SaveFailed
from async_flowrl.tickets.table import Refused
from async_flowrl.training.checkpoint_folder import written
from async_flowrl.training.checkpoint_manifest import DamagedCheckpoint
from async_flowrl.training.messages import TrainRequest, UpdateStats
from async_flowrl.types import EVALUATION, Prompt, RolloutRequest, Scores, Trajectory
from async_flowrl.verify import verify
from checkpoint_engine import RING, Ack, Header, Receiver, WeightsMismatch
from separation.group import WorkerDied
from tests.chaos.recovery_schedules import STEPS, undisturbed
from tests.support.toy import toy_config
from tests.support.toy_pool import Fault, ListObserver, Timing, World, no_fault
from tests.support.toy_recovery import (
    Disturb,
    Groups,
    Outside,
    at,
    evaluations,
    events,
    kill_after,
    logged,
    rollbacks,
    run_controller,
    summary,
    toy_ranks_meet,
)
from tests.support.toy_reward import ToyReward
from tests.support.toy_rollout import ToyRollout
from tests.support.toy_trainer import ToyTrainer

JUDGED = {"reward__terms": {"color": RewardTerm(name="tests.unit.rewards.own_rewards:Judge")}}
"""A reward that says that it is not deterministic (the toy pool scores in its place)."""


def config(k: int = 1, **changes: Any) -> Config:
    settings = {"resume": "auto", "monitor__progress": False, "save__every": 2} | changes
    return toy_config(k, steps=STEPS, **settings)


def go(root: Path, fault: Fault = no_fault, *, disturb: Disturb | None = None, **changes: Any) -> Path | None:
    return run_controller(config(**changes), root, World(Timing(), fault, ListObserver()), disturb=disturb)


def check_equal(found: Path, k: int = 1) -> None:
    """Weights, logged rewards and trained tickets are those of the undisturbed run, whose reward is deterministic."""
    assert not (found / "scores.jsonl").exists()
    assert summary(found)["weights_digest"] == undisturbed(k).digest
    assert logged(found) == undisturbed(k).lines
    assert [row for row in verify(found) if not row[1]] == []


@pytest.mark.parametrize("method", ["train_1", "train_last_4", "stage_3", "seal_4", "save_2", "snapshot_2"])
def test_a_dead_trainer_goes_on_from_the_last_checkpoint(method: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert go(root, at(**{method: "kill"}), hand_over="stream") is None
    (back,) = rollbacks(root)
    assert back in (0, 2)
    assert [event["kind"] for event in events(root, "fault")] == ["WorkerDied"]
    check_equal(root)


def test_a_worker_that_waits_for_weights_of_a_rank_that_dies_serves_after_the_recovery(tmp_path: Path) -> None:
    """The successor of a lost rollout worker is proven, and the only trainer rank dies when it is asked for a version.

    The rank is idle, because images take long, so nothing else notices its death. The successor is not to blame: it is
    not replaced.
    """
    proven: list[str] = []

    def fault(worker: str, method: str, number: int) -> str | None:
        if method == "prove":
            proven.append(worker)
        asked = (worker, method) == ("trainer-0", "payload") and proven == ["rollout-0", "rollout-0.1"]
        return "kill" if asked or (worker, method, number) == ("rollout-0", "generate", 17) else None

    root = tmp_path / "run"
    world = World(Timing(generate=15.0), fault, ListObserver())
    assert run_controller(config(rollout__num_workers=1), root, world) is None
    assert rollbacks(root) == [4]
    faults = [(event["worker"], event["kind"]) for event in events(root, "fault")]
    assert faults == [("rollout-0", "WorkerDied"), ("trainer-0", "WorkerDied")]
    check_equal(root)


def test_a_worker_whose_base_was_not_compared_before_the_recovery_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer dies while the successor of a lost rollout worker loads, and the load ends in time."""
    load, made = ToyRollout.load, ToyRollout.generate
    served: set[str] = set()

    def other_base(self: ToyRollout) -> dict[str, str]:
        return load(self) | ({"base_digest": "other"} if self.name == "rollout-0.1" else {})

    def generate(self: ToyRollout, request: RolloutRequest) -> Any:
        served.add(self.name)
        return made(self, request)

    def fault(worker: str, method: str, number: int) -> str | None:
        if (worker, method, number) == ("rollout-0", "generate", 2):
            return "kill"
        return at(train_last_3="kill")(worker, method, number)

    class SlowLoad(Timing):
        def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
            return (
                20.0 if worker == "rollout-0.1" and method == "load" else super().duration(worker, method, call, args)
            )

    monkeypatch.setattr(ToyRollout, "load", other_base)
    monkeypatch.setattr(ToyRollout, "generate", generate)
    root = tmp_path / "run"
    assert run_controller(config(), root, World(SlowLoad(), fault, ListObserver())) is None
    assert rollbacks(root) and "rollout-0.1" not in served and "rollout-0.2" in served
    check_equal(root)


def test_the_step_after_a_recovery_is_measured_if_it_would_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second step is. All ranks die in step 3; new ones, at step 2 again, have not said yet what they need."""
    measured: list[tuple[int, bool]] = []
    add_up, take_step = ToyTrainer.add_up, ToyTrainer.take_step

    def seen(self: ToyTrainer, request: TrainRequest, *trajectories: Trajectory) -> Any:
        if self.index == 0:
            measured.append((request.step, request.probe is not None))
        return add_up(self, request, *trajectories)

    def asking(self: ToyTrainer) -> UpdateStats:
        return replace(take_step(self), measures_next=(self.step + 1) % 2 == 0)

    monkeypatch.setattr(ToyTrainer, "add_up", seen)
    monkeypatch.setattr(ToyTrainer, "take_step", asking)
    root = tmp_path / "run"
    everybody = {(f"trainer-{rank}", "add_up", 4) for rank in range(2)}
    with toy_ranks_meet():
        assert go(root, lambda *call: "kill" if call in everybody else None, trainer__num_workers=2) is None
    assert rollbacks(root) == [2]
    steps = [0, 1, 2, *range(2, STEPS)]
    assert measured == [(step, step % 2 == 0) for step in steps]


def test_a_trainer_that_dies_before_the_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert go(root, at(save_1="kill")) is None
    assert rollbacks(root) == [0]
    check_equal(root)


def test_a_trainer_that_dies_while_it_comes_back_is_replaced_too(tmp_path: Path) -> None:
    def fault(worker: str, method: str, number: int) -> str | None:
        deaths = {("trainer-0", "train_last", 4), ("trainer-0.1", "load", 1), ("trainer-0.2", "restore", 1)}
        return "kill" if (worker, method, number) in deaths else None

    root = tmp_path / "run"
    assert go(root, fault) is None
    assert [event["worker"] for event in events(root, "fault")] == ["trainer-0", "trainer-0.1", "trainer-0.2"]
    check_equal(root)


@pytest.mark.parametrize("recoveries", [0, 1, 3])
def test_a_trainer_that_always_dies_ends_the_run_by_name(recoveries: int, tmp_path: Path) -> None:
    root, changes = tmp_path / "run", {} if recoveries == 3 else {"limits__recoveries": recoveries}
    last = f"trainer-0.{recoveries}" if recoveries else "trainer-0"
    with pytest.raises(WorkerDied, match=rf"^{re.escape(last)} died"):
        go(root, lambda worker, method, number: "kill" if (method, number) == ("train_last", 2) else None, **changes)
    assert len(rollbacks(root)) == recoveries


@pytest.mark.parametrize("what", ["kill", "hang", "unloaded"])
def test_a_rollout_worker_that_cannot_forget_is_replaced(what: str, tmp_path: Path) -> None:
    """`unloaded`: it was just being replaced when the trainer died."""

    def fault(worker: str, method: str, number: int) -> str | None:
        if (worker, method, number) == ("trainer-0", "train_last", 2):
            return "kill"
        return what if (worker, method, number) == ("rollout-1", "clear", 1) else None

    async def kill_before(outside: Outside, groups: Groups) -> None:
        """A replacement is there after one second, without a model for another; the trainer dies in between."""
        while groups["trainer"].workers[0].calls.get("train_last", 0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        groups["rollout"].workers[1].kill()

    root = tmp_path / "run"
    assert go(root, fault, disturb=kill_before if what == "unloaded" else None) is None
    assert len(rollbacks(root)) == 1
    names = [event["worker"] for event in events(root, "worker")]
    assert "rollout-1.1" in names
    check_equal(root)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.3, 7.9, 12.2, 17.0, 25.0])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_killed_controller_and_resume(seconds: float, workers: int, tmp_path: Path) -> None:
    left = go(tmp_path / "run", disturb=kill_after(seconds))
    assert left is not None and not (left / "summary.json").exists()
    assert go(left, rollout__num_workers=workers) is None
    assert len(rollbacks(left)) == 1
    check_equal(left)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("grown", [True, False])
def test_a_killed_controller_of_an_elastic_pool_and_resume_with_another_size(
    grown: bool, workers: int, tmp_path: Path
) -> None:
    """It has four workers, or one, when it is killed; after it has gone on all leave, and two come later."""
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4}

    async def resize(outside: Outside, groups: Groups) -> None:
        pool = groups["rollout"]
        await asyncio.sleep(0.5)
        for _ in range(2 * grown):
            pool.growth.arrive()
        if not grown:
            pool.growth.drain(pool.workers[0], seconds=0.4)
        await asyncio.sleep(7.0)
        assert len(pool.workers) == (4 if grown else 1)
        outside.kill()

    async def all_leave(outside: Outside, groups: Groups) -> None:
        pool = groups["rollout"]
        await asyncio.sleep(2.5)
        for worker in list(pool.workers):
            pool.growth.drain(worker, seconds=0.3)
        await asyncio.sleep(15.0)
        assert not pool.workers
        pool.growth.arrive()
        pool.growth.arrive()

    left = go(tmp_path / "run", disturb=resize, **bounds)
    assert left is not None
    assert go(left, disturb=all_leave, rollout__num_workers=workers, **bounds) is None
    assert [event["workers"] for event in events(left, "worker_left")][-1] == 0
    assert [event["workers"] for event in events(left, "worker_joined")][-2:] == [1, 2]
    check_equal(left)


def test_a_checkpoint_does_not_grow_with_the_pipeline(tmp_path: Path) -> None:
    sizes = []
    for name, changes in (
        ("one", {"rollout__num_workers": 1}),
        ("many", {"rollout__num_workers": 4, "ticket_size": 2}),
    ):
        assert go(tmp_path / name, k=3, save__keep=9, **changes) is None
        tensors = (tmp_path / name / "checkpoints" / "step_4").glob("*.safetensors")
        sizes.append({file.name: file.stat().st_size for file in tensors})
    assert len(sizes[0]) == 3
    assert sizes[0] == sizes[1]


def test_checkpoints_are_written_beside_training(tmp_path: Path) -> None:
    """Each takes longer than a step; the next one waits for it, training does not."""
    lengths = {}
    for name, seconds, every in (("fast", 0.0, 3), ("slow", 9.0, 3), ("late", 30.0, 1)):
        world = World(Timing(save=seconds), no_fault, ListObserver())
        assert run_controller(config(save__every=every), tmp_path / name, world) is None
        lengths[name] = [round(e["ended"] - e["started"], 3) for e in events(tmp_path / name, "step")][1:]
        check_equal(tmp_path / name)
    assert lengths["slow"] == lengths["fast"], "a step waited for a checkpoint"
    assert sum(lengths["late"]) > 4 * 30.0, "two were written at the same time"
    assert [path.name for path in written(tmp_path / "slow" / "checkpoints")] == ["step_6", "step_3"]


def test_a_full_disk_is_loud_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    assert go(root, at(save_2="full", save_3="full")) is None
    loud = [record for record in caplog.records if "could not be written" in record.message]
    assert [record.levelno for record in loud] == [logging.WARNING] * 2
    assert "checkpoint 4 could not be written (2 in a row)" in loud[1].message
    assert "No space left on device" in loud[1].message
    assert [path.name for path in written(root / "checkpoints")] == ["step_6", "step_0"]
    check_equal(root)


def test_after_a_missed_checkpoint_the_one_before_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert go(root, at(save_2="full", train_last_4="kill")) is None
    assert rollbacks(root) == [0]
    check_equal(root)


@pytest.mark.parametrize("missed", [3, 1])
def test_a_disk_that_stays_full_ends_the_run_by_name(missed: int, tmp_path: Path) -> None:
    full = {f"save_{number}": "full" for number in range(2, 9)}
    changes = {} if missed == 3 else {"limits__missed_checkpoints": missed}
    with pytest.raises(SaveFailed, match=f"^{missed} checkpoints in a row could not be written: .*No space left"):
        go(tmp_path / "run", at(**full), save__every=1, **changes)
    assert [path.name for path in written(tmp_path / "run" / "checkpoints")] == ["step_0"]


@pytest.mark.parametrize("misses", [1, 2, 3])
def test_the_last_checkpoint_is_insisted_on(misses: int, tmp_path: Path) -> None:
    fault = at(**{f"save_{number}": "full" for number in range(4, 4 + misses)})
    if misses == LimitsConfig().missed_checkpoints:
        with pytest.raises(SaveFailed):
            go(tmp_path / "run", fault)
    else:
        assert go(tmp_path / "run", fault) is None
        check_equal(tmp_path / "run")


def spoil(checkpoint: Path) -> None:
    file = checkpoint / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = go(tmp_path / "run", at(train_last_5="kill"), disturb=kill_after(28.0))
    assert left is not None
    newest, older = written(left / "checkpoints")
    spoil(newest)
    assert go(left) is None
    assert rollbacks(left)[-1] == int(older.name.removeprefix("step_"))
    assert f"{newest.name}: weights.safetensors" in caplog.text and "trying an older one" in caplog.text
    check_equal(left)


def test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "run"

    async def damage(outside: Outside, groups: Groups) -> None:
        while not (root / "checkpoints" / "step_4").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        spoil(root / "checkpoints" / "step_4")

    assert go(root, at(train_last_5="kill"), disturb=damage) is None
    assert rollbacks(root) == [2]
    check_equal(root)


def test_nothing_but_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    left = go(tmp_path / "run", disturb=kill_after(14.0))
    assert left is not None
    for checkpoint in written(left / "checkpoints"):
        spoil(checkpoint)
    lines = (left / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="holds no sound checkpoint to go on from"):
        go(left)
    assert lines == (left / "metrics.jsonl").read_bytes(), "nothing is cut back by a refusal"
    root = tmp_path / "running"

    async def damage_all(outside: Outside, groups: Groups) -> None:
        await asyncio.sleep(14.0)
        for checkpoint in written(root / "checkpoints"):
            spoil(checkpoint)

    with pytest.raises(DamagedCheckpoint, match="holds no sound checkpoint to go on from"):
        go(root, at(train_last_4="kill"), disturb=damage_all)


def test_an_older_checkpoint_on_purpose(tmp_path: Path) -> None:
    """Later ones are of a history that has ended: a trainer that dies then must not go on from them."""
    root = tmp_path / "run"
    assert go(root, save__keep=9) is None
    older = root / "checkpoints" / "step_2"
    assert go(root, at(train_last_1="kill"), resume=str(older), save__keep=9) is None
    assert rollbacks(root) == [2, 2]
    check_equal(root)


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    """It is copied into the run's own folder before anything else, so that a trainer may die at once."""
    root = tmp_path / "run"
    assert go(tmp_path / "other", save__keep=9) is None
    other = tmp_path / "other" / "checkpoints" / "step_4"
    assert go(root, at(train_last_1="kill"), resume=str(other)) is None
    assert rollbacks(root) == [4, 4]
    assert summary(root)["weights_digest"] == undisturbed(1).digest


def moody(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each group of images was scored. Only the first time the score is what the images deserve.

    One prompt of five gets none the first time, and one later.
    """
    asked: Counter[bytes] = Counter()
    score = ToyReward.score

    def spoilt(self: ToyReward, prompt: Prompt, *images: Any) -> Scores:
        asked[key := b"".join(image.tobytes() for image in images)] += 1
        if prompt.index == 2 and asked[key] == 1:
            raise ConnectionError("the judge is away")
        total = tuple(x + 40.0 * i * (asked[key] - 1) for i, x in enumerate(score(self, prompt, *images).total))
        return Scores(total, {"color": total})

    monkeypatch.setattr(ToyReward, "score", spoilt)
    return asked


def scored(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "scores.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("killed", ["controller", "trainer", "both"])
def test_groups_are_not_scored_a_second_time_if_that_would_change_their_scores(
    killed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = JUDGED | {"reward__on_error": "skip", "reward__retries": 0, "save__every": 4}
    asked = moody(monkeypatch)
    assert go(tmp_path / "calm", **settings) is None
    asked.clear()
    root = tmp_path / "run"
    dead_trainer = at(train_last_3="kill") if killed != "controller" else no_fault
    known: list[dict[str, Any]] = []

    async def kill_in_step_3(outside: Outside, groups: Groups) -> None:
        while not (root / "scores.jsonl").exists() or scored(root)[-1]["step"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.37)
        outside.kill()

    if killed != "trainer":
        left = go(root, dead_trainer, disturb=kill_in_step_3, **settings)
        assert left is not None
        root, known = left, scored(left)
        with (root / "scores.jsonl").open("a") as file:
            file.write('{"step": 5, "gro')
    assert go(root, no_fault if known else dead_trainer, **settings) is None
    assert summary(root)["weights_digest"] == summary(tmp_path / "calm")["weights_digest"]
    assert logged(root) == logged(tmp_path / "calm")
    lines = scored(root)
    assert lines[: len(known)] == known
    assert Counter(line["step"] for line in lines) == dict.fromkeys(range(STEPS), 4)
    assert {line["total"] is None for line in lines} == {True, False}
    assert len(rollbacks(root)) == (2 if killed == "both" else 1)
    assert not known or [line for line in known if line["step"] >= rollbacks(root)[-1]], "nothing was there to reuse"
    assert set(asked.values()) == {1}
    assert [row for row in verify(root) if not row[1]] == []


def test_a_checkpoint_of_another_run_comes_without_its_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = moody(monkeypatch)
    settings = JUDGED | {"reward__on_error": "skip", "save__keep": 9}
    assert go(tmp_path / "other", **settings) is None
    asked.clear()
    assert go(tmp_path / "run", resume=str(tmp_path / "other" / "checkpoints" / "step_4"), **settings) is None
    assert Counter(line["step"] for line in scored(tmp_path / "run")) == {4: 4, 5: 4}
    assert len(asked) == 2 * 4 + 2, "two steps, and the prompts of the last evaluation"


def test_forced_prompts_are_scored_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that were written down before are those of other images, though step, group and weights are the same."""
    asked = moody(monkeypatch)
    settings = JUDGED | {"save__every": 4, "evaluate__every": 0}
    root = tmp_path / "run"

    async def kill_in_step_3(outside: Outside, groups: Groups) -> None:
        while not (root / "scores.jsonl").exists() or scored(root)[-1]["step"] < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.37)
        outside.kill()

    left = go(root, disturb=kill_in_step_3, **settings)
    assert left is not None
    before = {(line["step"], line["group"]) for line in scored(left)}
    asked.clear()
    others = [Prompt(index, f"another prompt {index}") for index in range(5)]
    monkeypatch.setattr("tests.support.toy_recovery.PROMPTS", others)
    assert go(left, resume="force", **settings) is None
    (back,) = rollbacks(left)
    assert any(step >= back for step, _ in before), "nothing was there to reuse"
    assert Counter(line["step"] for line in scored(left)) == dict.fromkeys(range(STEPS), 4)
    assert len(asked) == (STEPS - back) * 4 + 2, "and the prompts of the last evaluation"


def test_a_trainer_that_dies_early_goes_on_from_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    """It died before the run had a checkpoint of its own."""
    assert go(tmp_path / "other", save__keep=9) is None
    resume = str(tmp_path / "other" / "checkpoints" / "step_4")
    assert go(tmp_path / "run", at(save_1="kill"), resume=resume) is None
    assert rollbacks(tmp_path / "run") == [4, 4]
    assert summary(tmp_path / "run")["weights_digest"] == undisturbed(1).digest


@pytest.mark.parametrize(("device", "warned"), [("cuda:1", False), ("cpu", True)])
def test_a_resume_on_another_type_of_device_is_said(
    device: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = ToyTrainer.load
    monkeypatch.setattr(ToyTrainer, "load", lambda trainer, *_: load(trainer) | {"device": "cuda:0"})
    left = go(tmp_path / "run", disturb=kill_after(12.2))
    assert left is not None and "will differ" not in caplog.text
    monkeypatch.setattr(ToyTrainer, "load", lambda trainer, *_: load(trainer) | {"device": device})
    assert go(left) is None
    said = "resuming, but device was cuda and is cpu: the last bits of the weights will differ" in caplog.text
    assert (said, "will differ" in caplog.text) == (warned, warned)


@pytest.mark.parametrize(("k", "number"), [(0, 1), (0, 3), (1, 5), (3, 8)])
def test_an_evaluation_that_its_attempt_did_not_finish_is_made_by_the_next(k: int, number: int, tmp_path: Path) -> None:
    settings = {"evaluate__every": 2, "evaluate__before_training": True, "save__every": 1, "k": k}
    assert go(tmp_path / "calm", **settings) is None
    begun = 0

    def count(worker: str, method: str, call: int) -> None:
        nonlocal begun
        begun += method == "generate/evaluation"

    async def kill_in_evaluation(outside: Outside, groups: Groups) -> None:
        while begun < number:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        outside.kill()

    left = go(tmp_path / "run", count, disturb=kill_in_evaluation, **settings)
    assert left is not None
    assert len(evaluations(left)) == (number - 1) // 2, "the disturbance did not happen"
    assert go(left, **settings) is None
    assert sorted(evaluations(left)) == [0, 2, 4, 6]
    assert evaluations(left) == evaluations(tmp_path / "calm")


def test_an_evaluation_whose_weights_are_gone_is_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class SlowEvaluation(Timing):
        def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
            slow = method == "generate" and args[0].kind == EVALUATION and args[0].version == 2
            return 15.0 if slow else super().duration(worker, method, call, args)

    settings = config(0, evaluate__every=2, save__every=1)
    left = run_controller(
        settings, tmp_path / "run", World(SlowEvaluation(), no_fault, ListObserver()), disturb=kill_after(26.0)
    )
    assert left is not None
    assert 2 not in evaluations(left)
    assert run_controller(settings, left, World(Timing(), no_fault, ListObserver())) is None
    assert rollbacks(left)[0] > 2
    assert "versions [2] were being evaluated when their attempt ended; their weights are gone" in caplog.text
    assert sorted(evaluations(left)) == [4, 6]


@pytest.mark.parametrize("door", ["acknowledges", "generates"])
def test_weights_of_an_earlier_attempt_are_refused(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt has versions with other bytes (as on another GPU); a worker goes on with the earlier ones."""
    restore, receive, generate = ToyTrainer.restore, Receiver.receive, ToyRollout.generate
    known: dict[int, str] = {}

    def elsewhere(self: ToyTrainer, path: str) -> int:
        version = restore(self, path)
        for tensors in self.retained.values():
            tensors["layer.lora_B.weight"] += 1e-3
        return version

    def acknowledges(self: Receiver, header: Header, buffer: Any, slot: str = RING) -> Ack:
        ack = receive(self, header, buffer, slot)
        return replace(ack, digest=known.setdefault(ack.version, ack.digest))

    def generates(self: ToyRollout, request: RolloutRequest) -> Any:
        report, *payload = generate(self, request)
        return replace(report, digest=known.setdefault(report.version, report.digest)), *payload

    monkeypatch.setattr(ToyTrainer, "restore", elsewhere)
    if door == "acknowledges":
        monkeypatch.setattr(Receiver, "receive", acknowledges)
    else:
        monkeypatch.setattr(ToyRollout, "generate", generates)
    sentence = {
        "acknowledges": r"rollout-\d acknowledged Ack\(stream='policy', version=1, digest='\w+'.*but was sent policy 1",
        "generates": r"train ticket \d+ .* was made with weights \w+, but version \d is \w+",
    }
    with pytest.raises((Refused, WeightsMismatch), match=sentence[door]):
        go(tmp_path / "run", at(train_last_4="kill"))
    assert rollbacks(tmp_path / "run") == [2]
