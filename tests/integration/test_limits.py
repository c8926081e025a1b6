"""Tests of the steps at which runs end, save and evaluate, also if the numbers do not divide."""

from collections import Counter
from pathlib import Path

import pytest

from async_flowrl.data.sampler import Sampler
from tests.integration.runs import Run, train


@pytest.mark.parametrize(
    ("steps", "save", "evaluate"),
    [
        (1, 0, 0),
        (5, 2, 3),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 5, 5), (1, 1, 1), (5, 3, 2), (4, 4, 2))),
    ],
)
def test_steps_checkpoints_and_evaluations(steps: int, save: int, evaluate: int, tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        "one_step_off",
        f"total_steps={steps}",
        f"save.every={save}",
        "save.keep=9",
        f"evaluate.every={evaluate}",
        "evaluate.before_training=true",
        "evaluate.images_per_prompt=1",
        "rollout.num_inference_steps=2",
    )
    check_ends(run, steps, save, evaluate)


@pytest.mark.parametrize(
    ("epochs", "total", "steps", "save", "evaluate"),
    [
        (2, 100, 3, 2, 2),
        (3, 4, 4, 3, 0),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 100, 2, 3, 1), (3, 100, 5, 2, 3))),
    ],
)
def test_epochs_end_a_run_unless_total_steps_do(
    epochs: int, total: int, steps: int, save: int, evaluate: int, tmp_path: Path
) -> None:
    """Three prompts, two per step: the last step of an odd number of epochs reaches into the next one."""
    (tmp_path / "three.txt").write_text("red\ngreen\nblue\n")
    run = train(
        tmp_path / "run",
        "one_step_off",
        f"data.train={tmp_path / 'three.txt'}",
        f"epochs={epochs}",
        f"total_steps={total}",
        f"save.every={save}",
        "save.keep=9",
        f"evaluate.every={evaluate}",
        "evaluate.before_training=true",
        "evaluate.images_per_prompt=1",
        "rollout.num_inference_steps=2",
    )
    check_ends(run, steps, save, evaluate)
    assert run.summary["total_steps"] == steps
    sampler = Sampler(3, 2, seed=0, shuffle=True)
    seen = Counter(p for step in range(steps) for p in sampler.step(step))
    if total == 100:
        assert min(seen.values()) == epochs
        assert sum(seen.values()) - 3 * epochs < 2
    log = (run.root / "logs" / "controller.log").read_text()
    assert ("epochs=3 would take 5 steps; total_steps=4 ends the run before" in log) == (total == 4)


def check_ends(run: Run, steps: int, save: int, evaluate: int) -> None:
    """Steps, checkpoints and evaluations are those of a run of `steps` steps, and nothing else."""
    saved = {0, steps, *(range(save, steps + 1, save) if save else ())}
    seen = {0, steps, *(range(evaluate, steps + 1, evaluate) if evaluate else ())}
    assert [line["step"] for line in run.metrics] == list(range(steps))
    assert {int(p.name.removeprefix("step_")) for p in (run.root / "checkpoints").glob("step_*")} == saved
    assert {int(p.stem.removeprefix("step_")) for p in (run.root / "images").glob("step_*.png")} == seen
    assert {line["step"] + 1 for line in run.metrics if "evaluation/reward/mean" in line} == seen - {0}
    evaluated = run.tickets("RUNNING", kind="evaluation")
    assert {event["version"] for event in evaluated} == seen
    assert run.summary["tickets"]["trained"] == run.summary["tickets"]["issued"] == 2 * steps
