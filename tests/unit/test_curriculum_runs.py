"""Tests of whole runs with data.curriculum: timing, workers and kills do not change which prompts are trained."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.schema import CurriculumConfig
from async_flowrl.types import Prompt
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import Timing, World, no_fault
from tests.support.toy_recovery import at, kill_after, logged, rollbacks, run_controller, summary
from tests.support.toy_reward import score_alike

STEPS = 12
DULL = ("prompt 1", "prompt 4")


@pytest.fixture(autouse=True)
def _dull_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    score_alike(monkeypatch, lambda prompt: prompt.text in DULL)


def settings(**changes: Any) -> dict[str, Any]:
    return {"steps": STEPS, "data__curriculum": CurriculumConfig(after=1, skip_epochs=2), **changes}


def run(timing: Timing | None = None, k: int = 1, **changes: Any) -> ToyRun:
    return virtual(toy_config(k, **settings(**changes)), timing)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_timing_and_workers_change_nothing(k: int) -> None:
    plain = run(k=k)
    set_aside = [line["curriculum/set_aside"] for line in plain.lines]
    assert set_aside[: k + 1] == [0] * (k + 1), "no step is trained yet when the first ones are chosen"
    assert max(set_aside) == len(DULL)
    slow = Timing(seed=7, spread=0.9, slow={"rollout-1": 3.0})
    for timing, workers, hand_over in ((slow, 2, "batch"), (slow, 4, "stream"), (Timing(update=0.01), 1, "batch")):
        other = run(timing, k, rollout__num_workers=workers, hand_over=hand_over)
        assert other.digest == plain.digest
        assert [line["curriculum/epoch"] for line in other.lines] == [line["curriculum/epoch"] for line in plain.lines]


def test_dull_prompts_come_less_often() -> None:
    share = {after: ratio(run(data__curriculum=CurriculumConfig(after, skip_epochs=9))) for after in (1, None)}
    assert share[1] < 0.6 * share[None]
    assert "curriculum/epoch" not in run(data__curriculum=CurriculumConfig()).lines[-1]


def ratio(found: ToyRun) -> float:
    """Mean share of the groups of a step that have no spread."""
    return sum(line["zero_std_ratio"] for line in found.lines) / len(found.lines)


@pytest.mark.parametrize(("k", "together"), [(1, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 3)])
def test_a_killed_trainer_and_a_killed_controller(
    k: int, together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with several tickets per batch, which depend on the lengths of the chosen prompts."""
    monkeypatch.setattr("tests.support.toy_recovery.PROMPTS", [Prompt(i, f"{'x' * (7 * i % 5)} {i}") for i in range(5)])
    monkeypatch.setattr(f"{__name__}.DULL", ("xx 1", "xxx 4"))
    batches = {"ticket_size": 2, "rollout__tickets_per_batch": together}

    def controller(root: Path, fault: Any = no_fault, **how: Any) -> Path | None:
        config = toy_config(k, **settings(resume="auto", console="quiet", save__every=2), **batches)
        return run_controller(config, root, World(fault=fault), **how)

    plain, dead = tmp_path / "plain", tmp_path / "dead"
    assert controller(plain) is None
    assert controller(dead, at(add_up_7="kill")) is None
    assert rollbacks(dead)
    left = controller(tmp_path / "killed", disturb=kill_after(20.0))
    assert left is not None and controller(left) is None
    assert 0 < rollbacks(left)[0] < STEPS
    for found in (dead, left):
        assert summary(found)["weights_digest"] == summary(plain)["weights_digest"]
        assert logged(found) == logged(plain)
    assert Counter(line["curriculum/set_aside"] for line in logged(plain))[2] > 2
