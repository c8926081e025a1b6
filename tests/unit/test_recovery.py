"""Tests of recovery from dead trainers: the next attempt begins at the last checkpoint, and the weights are equal."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_flowrl.cli.verify import verify
from async_flowrl.config.schema import LimitsConfig, RewardTerm
from async_flowrl.controller.kept_state import MOST, DamagedState, KeptState, KeptStates
from async_flowrl.controller.resume import Resume
from async_flowrl.observability.evaluations import Evaluation, EvaluationLog
from async_flowrl.run import launch
from async_flowrl.run.recovery import take_over, with_unevaluated
from async_flowrl.tickets.table import Refused
from async_flowrl.training.checkpoint import Checkpoint, PackedState
from async_flowrl.types import EMA, POLICY, Prompt, RolloutRequest, Scores
from checkpoint_engine import RING, Ack, Header, Receiver, WeightsMismatch
from separation.group import RefLost, WorkerDied
from tests.chaos.recovery_schedules import STEPS
from tests.support.toy_pool import Timing, no_fault, once
from tests.support.toy_recovery import (
    Groups,
    Outside,
    at,
    evaluations,
    events,
    kill_after,
    logged,
    rollbacks,
    summary,
    toy_ranks_meet,
)
from tests.support.toy_reward import ToyReward
from tests.support.toy_rollout import ToyRollout
from tests.support.toy_trainer import ToyTrainer
from tests.support.virtual import VirtualPool, VirtualWorker, run_virtual
from tests.unit.recovery_runs import check_equal, config, go

KILLED_AT = ["train_1", "add_up_4", "stage_3", "seal_4", "save_2", "snapshot_2", "kept_state_3"]
"""Method and number of the call in which the only trainer rank dies."""


@pytest.mark.parametrize("method", KILLED_AT)
def test_a_dead_trainer_goes_on_from_the_last_kept_state(method: str, tmp_path: Path) -> None:
    """The state of the step before, or of one more step before if the rank died before its state was fetched."""
    root = tmp_path / "run"
    assert go(root, at(**{method: "kill"}), hand_over="stream") is None
    (back,) = rollbacks(root)
    trained = [event["step"] for event in events(root, "step") if event["time"] < events(root, "rollback")[0]["time"]]
    assert back in (len(trained), max(0, len(trained) - 1))
    assert [event["kind"] for event in events(root, "fault")] == ["WorkerDied"]
    check_equal(root)


def test_a_worker_that_waits_for_weights_of_a_rank_that_dies_serves_after_the_recovery(tmp_path: Path) -> None:
    """The replacement of a lost rollout worker is proven, and the only trainer rank dies as it is asked for a version.

    The rank is idle, because images take long, so nothing else notices its death. The replacement is not to blame:
    it is not replaced.
    """
    proven: list[str] = []

    def fault(worker: str, method: str, number: int) -> str | None:
        if method == "prove":
            proven.append(worker)
        asked = (worker, method) == ("trainer-0", "payload") and proven == ["rollout-0", "rollout-0.1"]
        return "kill" if asked or (worker, method, number) == ("rollout-0", "generate", 17) else None

    root = tmp_path / "run"
    assert go(root, fault, timing=Timing(generate=15.0), rollout__num_workers=1) is None
    assert rollbacks(root) in ([4], [5])
    faults = [(event["worker"], event["kind"]) for event in events(root, "fault")]
    assert faults == [("rollout-0", "WorkerDied"), ("trainer-0", "WorkerDied")]
    check_equal(root)


@pytest.mark.parametrize("recoveries", [0, 1, 3])
def test_a_trainer_that_always_dies_ends_the_run_by_name(recoveries: int, tmp_path: Path) -> None:
    root, changes = tmp_path / "run", {} if recoveries == 3 else {"limits__recoveries": recoveries}
    last = f"trainer-0.{recoveries}" if recoveries else "trainer-0"

    def fault(worker: str, method: str, number: int) -> str | None:
        """Step 0 is trained, and nothing after it."""
        return "kill" if method == "add_up" and (worker, number) != ("trainer-0", 1) else None

    with pytest.raises(WorkerDied, match=rf"^{re.escape(last)} died"):
        go(root, fault, **changes)
    assert len(rollbacks(root)) == recoveries


@pytest.mark.parametrize("tune", ["lora", "full"])
def test_deaths_after_steps_that_had_not_been_trained_before_do_not_count(tune: str, tmp_path: Path) -> None:
    """Every trainer dies in its second step. The run goes on where the first one is kept, and ends where it is lost."""
    root = tmp_path / "run"

    def fault(worker: str, method: str, number: int) -> str | None:
        return "kill" if (method, number) == ("add_up", 2) else None

    if tune == "full":  # The checkpoints are of every third step, so that the same steps are trained again.
        with pytest.raises(WorkerDied):
            go(root, fault, tune=tune, save__every=3)
        assert len(rollbacks(root)) == LimitsConfig().recoveries
    else:
        assert go(root, fault, limits__recoveries=1) is None
        assert len(rollbacks(root)) == STEPS - 1
        check_equal(root)


@pytest.mark.parametrize("what", ["kill", "hang", "unloaded"])
def test_a_rollout_worker_that_cannot_forget_is_replaced(what: str, tmp_path: Path) -> None:
    """`unloaded`: it was just being replaced when the trainer died."""

    def fault(worker: str, method: str, number: int) -> str | None:
        if (worker, method, number) == ("trainer-0", "train", 2):
            return "kill"
        return what if (worker, method, number) == ("rollout-1", "clear", 1) else None

    async def kill_before(outside: Outside, groups: Groups) -> None:
        """A replacement is there after one second, without a model for another; the trainer dies in between."""
        while groups["trainer"].workers[0].calls.get("train", 0) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        groups["rollout"].workers[1].kill()

    root = tmp_path / "run"
    assert go(root, fault, disturb=kill_before if what == "unloaded" else None) is None
    assert len(rollbacks(root)) == 1
    names = [event["worker"] for event in events(root, "worker")]
    assert "rollout-1.1" in names
    check_equal(root)


class TakingOver(VirtualWorker):
    """A trainer rank on a node that takes a second to take a state over; those in `lost` do not get its files."""

    lost: tuple[int, ...] = ()

    def __init__(self, index: int, node: str) -> None:
        super().__init__("trainer", index, SimpleNamespace(take_over=lambda digest, files, held: digest))
        self.node = node

    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        return float(method == "take_over")

    def run(self, method: str, args: Sequence[Any]) -> Any:
        if method == "take_over" and self.index in self.lost:
            raise RefLost("the files")
        return super().run(method, args)


def test_ranks_take_a_kept_state_over_one_by_one_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def seconds() -> float:
        ranks = [TakingOver(index, f"node-{index // 3}") for index in range(12)]
        trainers: Any = SimpleNamespace(workers=VirtualPool("trainer", ranks))
        began = asyncio.get_running_loop().time()
        state = PackedState.of(Checkpoint({"weights": {"a": torch.ones(1)}}, {}, {}))
        await take_over(trainers, KeptState(1, "digest", state, {}), ())
        return asyncio.get_running_loop().time() - began

    assert run_virtual(seconds()) == 3.0
    monkeypatch.setattr(TakingOver, "lost", (7,))
    with pytest.raises(WorkerDied, match="trainer-0 died"):
        run_virtual(seconds())


@pytest.mark.parametrize("door", ["acknowledges", "generates"])
def test_weights_of_an_earlier_attempt_are_refused(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt has versions with other bytes (as on another GPU); a worker goes on with the earlier ones."""
    take_over, receive, generate = ToyTrainer.take_over, Receiver.receive, ToyRollout.generate
    known: dict[int, str] = {}

    def elsewhere(self: ToyTrainer, *state: Any) -> str:
        taken = take_over(self, *state)
        for tensors in self.retained.values():
            tensors["layer.lora_B.weight"] += 1e-3
        return taken

    def acknowledges(self: Receiver, header: Header, buffer: Any, slot: str = RING) -> Ack:
        ack = receive(self, header, buffer, slot)
        return replace(ack, digest=known.setdefault(ack.version, ack.digest))

    def generates(self: ToyRollout, requests: Sequence[RolloutRequest]) -> Any:
        (report,), *payload = generate(self, requests)
        return [replace(report, digest=known.setdefault(report.version, report.digest))], *payload

    monkeypatch.setattr(ToyTrainer, "take_over", elsewhere)
    if door == "acknowledges":
        monkeypatch.setattr(Receiver, "receive", acknowledges)
    else:
        monkeypatch.setattr(ToyRollout, "generate", generates)
    sentence = {
        "acknowledges": r"rollout-\d acknowledged Ack\(stream='policy', version=2, digest='\w+'.*but was sent policy 2",
        "generates": r"train ticket \d+ .* was made with weights \w+, but version \d is \w+",
    }
    with pytest.raises((Refused, WeightsMismatch), match=sentence[door]):
        go(tmp_path / "run", at(add_up_4="kill"))
    assert len(rollbacks(tmp_path / "run")) == 1


def test_the_two_newest_states_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[int]] = []
    settle = KeptStates.settle

    async def seen(self: KeptStates, ctx: Any) -> None:
        await settle(self, ctx)
        held.append([state.version for state in self.states])

    monkeypatch.setattr(KeptStates, "settle", seen)
    assert go(tmp_path / "run") is None
    assert held == [[STEPS - 1, STEPS]] and len(held[0]) == MOST


def test_a_state_that_arrives_damaged_ends_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_state = ToyTrainer.kept_state

    def damaged(self: ToyTrainer, version: int) -> Any:
        digest, state = kept_state(self, version)
        state.data[0] ^= version == 3
        return digest, state

    monkeypatch.setattr(ToyTrainer, "kept_state", damaged)
    with pytest.raises(DamagedState, match="version 3"):
        go(tmp_path / "run")


def test_a_held_state_that_is_damaged_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, root = KeptStates.newest, tmp_path / "run"
    held: list[int] = []

    def spoilt(self: KeptStates) -> KeptState | None:
        held.extend(state.version for state in self.states)
        self.states[-1].packed.data[0] ^= 1
        return newest(self)

    monkeypatch.setattr(KeptStates, "newest", spoilt)
    assert go(root, at(add_up_5="kill"), save__every=9) is None
    assert len(held) == MOST and rollbacks(root) == held[:1]
    check_equal(root)


@pytest.mark.parametrize(("damaged", "back"), [(True, 3), (False, 4)])
def test_the_newer_of_kept_state_and_sound_checkpoint_is_taken(tmp_path: Path, damaged: bool, back: int) -> None:
    """The rank dies when the checkpoint of version 4 is written, and its state has not come."""
    root = tmp_path / "run"
    faults = {("kept_state", 4): "hang", ("add_up", 5): "kill"}

    def fault(_: str, method: str, number: int) -> str | None:
        file = root / "checkpoints" / "step_4" / "weights.safetensors"
        if damaged and method == "load" and file.exists():
            file.write_bytes(file.read_bytes()[:-1])
        return faults.pop((method, number), None)

    assert go(root, fault) is None
    assert rollbacks(root) == [back]
    check_equal(root)


def test_a_state_that_is_on_its_way_when_another_rank_dies_is_kept(tmp_path: Path) -> None:
    """The first rank lives, so what it has copied is not lost: only the step under way is trained again."""
    root = tmp_path / "run"
    slow, dies = once("trainer-0", "kept_state", 3, "delay"), once("trainer-1", "train", 4, "kill")
    with toy_ranks_meet():
        assert go(root, lambda *call: slow(*call) or dies(*call), trainer__num_workers=2) is None
    (back,) = rollbacks(root)
    finished = [e["step"] + 1 for e in events(root, "step") if e["time"] < events(root, "rollback")[0]["time"]]
    assert back == finished[-1]
    check_equal(root)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_evaluation_whose_version_is_old_when_a_rank_dies_is_made_by_the_next_attempt(
    tmp_path: Path, ema: float | None
) -> None:
    """Two of four workers evaluate version 2 when the only rank dies in step 3; with K=0 one version is retained."""
    settings: dict[str, Any] = {"k": 0, "rollout__num_workers": 4, "evaluate__every": 2, "trainer__ema_decay": ema}
    calm, root = tmp_path / "calm", tmp_path / "run"
    assert go(calm, **settings) is None
    assert go(root, at(add_up_4="kill"), timing=Timing(evaluation={2: 28.0}), **settings) is None
    assert rollbacks(root) == [3]
    assert evaluations(root) == evaluations(calm) and sorted(evaluations(root)) == [2, 4, 6]


@pytest.mark.parametrize(
    ("seconds", "workers"), [(0.0, 1), (1.0, 4), (3.3, 1), (7.9, 4), (12.2, 1), (17.0, 4), (25.0, 1)]
)
def test_a_killed_controller_and_resume(seconds: float, workers: int, tmp_path: Path) -> None:
    left = go(tmp_path / "run", disturb=kill_after(seconds))
    assert left is not None and not (left / "summary.json").exists()
    assert go(left, rollout__num_workers=workers) is None
    assert len(rollbacks(left)) == 1
    check_equal(left)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_killed_controller_of_an_elastic_pool_and_resume_with_another_size(workers: int, tmp_path: Path) -> None:
    """It has four workers when it is killed; after it has gone on all leave, and two come later."""
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4}

    async def resize(outside: Outside, groups: Groups) -> None:
        pool = groups["rollout"]
        await asyncio.sleep(0.5)
        pool.growth.arrive()
        pool.growth.arrive()
        await asyncio.sleep(7.0)
        assert len(pool.workers) == 4
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


def test_an_older_checkpoint_on_purpose(tmp_path: Path) -> None:
    """Later ones are of a history that has ended: a trainer that dies then must not go on from them."""
    root = tmp_path / "run"
    assert go(root, save__keep=9) is None
    older = root / "checkpoints" / "step_2"
    assert go(root, at(add_up_1="kill"), resume=str(older), save__keep=9) is None
    assert rollbacks(root) == [2, 2]
    check_equal(root)


def test_of_the_held_versions_only_those_are_kept_whose_evaluation_is_lacking(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "evaluations.jsonl")
    log.add(Evaluation(2, False, "same", 12, 1.0, {}))
    log.add(Evaluation(4, True, "same", 12, 1.0, {}))
    resume = Resume(None, 6, {}, held=frozenset({(POLICY, 2), (POLICY, 4), (EMA, 5)}))
    assert with_unevaluated(config(), resume, log).held == {(POLICY, 4)}
    assert with_unevaluated(config(trainer__ema_decay=0.9), resume, log).held_versions == {5}


JUDGED = {"reward__terms": {"color": RewardTerm(name="tests.unit.rewards.own_rewards:Judge")}}
"""A reward that says that it is not deterministic (the toy pool scores in its place)."""


def moody(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """How often each group of images was scored. Only the first time the score is what the images deserve.

    One prompt of five gets none the first time, and one later.
    """
    asked: Counter[bytes] = Counter()
    score = ToyReward.score

    def spoilt(self: ToyReward, terms: Any, prompt: Prompt, *images: Any) -> Scores:
        asked[key := b"".join(image.tobytes() for image in images)] += 1
        if prompt.index == 2 and asked[key] == 1:
            raise ConnectionError("the judge is away")
        total = tuple(x + 40.0 * i * (asked[key] - 1) for i, x in enumerate(score(self, terms, prompt, *images).total))
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
    dead_trainer = at(add_up_3="kill") if killed != "controller" else no_fault
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
    """It is copied into the run's own folder before anything else, so that a trainer may die at once."""
    asked = moody(monkeypatch)
    settings = JUDGED | {"reward__on_error": "skip", "save__keep": 9}
    assert go(tmp_path / "other", **settings) is None
    asked.clear()
    other = tmp_path / "other" / "checkpoints" / "step_4"
    assert go(tmp_path / "run", at(add_up_1="kill"), resume=str(other), **settings) is None
    assert rollbacks(tmp_path / "run") == [4, 4]
    assert summary(tmp_path / "run")["weights_digest"] == summary(tmp_path / "other")["weights_digest"]
    assert Counter(line["step"] for line in scored(tmp_path / "run")) == {4: 4, 5: 4}
    assert len(asked) == 2 * 4 + 2, "two steps, and the prompts of the last evaluation"


def test_trainer_ranks_on_different_kinds_of_devices_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = ToyTrainer.load
    monkeypatch.setattr(
        ToyTrainer, "load", lambda self, *given: load(self, *given) | {"device_kind": f"card {self.index}"}
    )
    with toy_ranks_meet():
        assert go(tmp_path / "run", trainer__num_workers=2) is None
    (warning,) = (record for record in caplog.records if record.name == launch.__name__)
    assert warning.levelname == "WARNING" and warning.args == ("1 × card 0, 1 × card 1",)
