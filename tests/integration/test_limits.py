"""Tests of the steps at which runs end, save and evaluate, also if the numbers do not divide."""

from pathlib import Path

import pytest

from tests.integration.runs import Run, train


@pytest.mark.extended
@pytest.mark.parametrize(
    ("steps", "save", "evaluate"),
    [(1, 0, 0), (5, 2, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 5, 5), (4, 4, 2)))],
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
