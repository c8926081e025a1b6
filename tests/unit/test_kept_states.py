"""Tests of the states that the controller keeps after every step of a LoRA, in virtual time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.controller.kept_state import MOST, DamagedState, KeptState, KeptStates
from async_flowrl.tickets.table import EVALUATION
from tests.chaos.recovery_schedules import STEPS
from tests.support.toy_pool import ListObserver, Timing, World, once
from tests.support.toy_recovery import (
    at,
    evaluations,
    events,
    rollbacks,
    run_controller,
    toy_ranks_meet,
)
from tests.support.toy_trainer import ToyTrainer
from tests.unit.recovery_runs import check_equal, config, go


class SlowEvaluation(Timing):
    """The evaluation of version 2 takes many steps."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        slow = method == "generate" and args[0][0].kind == EVALUATION and args[0][0].version == 2
        return 28.0 if slow else super().duration(worker, method, call, args)


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
        digest, files = kept_state(self, version)
        name = "weights.safetensors"
        return digest, files if version != 3 else {**files, name: files[name][:-1] + bytes([files[name][-1] ^ 1])}

    monkeypatch.setattr(ToyTrainer, "kept_state", damaged)
    with pytest.raises(DamagedState, match="version 3"):
        go(tmp_path / "run")


def test_a_held_state_that_is_damaged_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest, root = KeptStates.newest, tmp_path / "run"
    held: list[int] = []

    def spoilt(self: KeptStates) -> KeptState | None:
        held.extend(state.version for state in self.states)
        state, name = self.states[-1], "optimizer.safetensors"
        self.states[-1] = replace(state, files={**state.files, name: state.files[name][:-1]})
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
    assert run_controller(config(**settings), calm, World(Timing(), lambda *call: None, ListObserver())) is None
    world = World(SlowEvaluation(), at(add_up_4="kill"), ListObserver())
    assert run_controller(config(**settings), root, world) is None
    assert rollbacks(root) == [3]
    assert evaluations(root) == evaluations(calm) and sorted(evaluations(root)) == [2, 4, 6]
