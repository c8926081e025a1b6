"""Tests of failures beside the training (evaluations, pictures, monitors, report): the trained weights are kept."""

from pathlib import Path

import pytest

from async_flowrl.cli.verify import verify
from async_flowrl.config import exit_codes
from tests.integration.judge import DOWN_FILE
from tests.integration.runs import Run, train

JUDGE = (
    "+reward.terms={judge: {name: 'tests.integration.judge:judge'}, color: {weight: 0.0}}",
    "reward.retries=1",
    "reward.backoff=0.01",
)


@pytest.fixture
def down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of words for which the judge is down; none at first."""
    file = tmp_path / "down.txt"
    file.write_text("")
    monkeypatch.setenv(DOWN_FILE, str(file))
    return file


def prompts(folder: Path, name: str, *texts: str) -> str:
    (folder / name).write_text("".join(f"{text}\n" for text in texts))
    return str(folder / name)


@pytest.mark.extended
def test_a_judge_that_is_down_at_the_last_evaluation_costs_only_that_evaluation(
    down: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (
        f"data.train={prompts(tmp_path, 'train.txt', 'red', 'blue')}",
        f"data.evaluation={prompts(tmp_path, 'held.txt', 'green')}",
    )
    settings = (*JUDGE, *data, "total_steps=1", "monitor.report=true")
    down.write_text("green")
    run = train(tmp_path / "run", "one_step_off", *settings, code=exit_codes.INCOMPLETE)
    failed = run.summary["failed"]
    assert failed == ["evaluation of version 1: 1 of 1 prompts have no score"]
    assert f"failed   {failed[0]}" in capsys.readouterr().out
    assert sum("'judge' failed on prompt 'green'" in warning for warning in run.summary["warnings"]) == 1
    assert (run.root / "lora/pytorch_lora_weights.safetensors").exists() and (run.root / "report.html").exists()
    assert not [key for line in run.metrics for key in line if key.startswith("evaluation")]
    assert all(ok for _, ok, _ in verify(run.root))
    down.write_text("")
    again = train(run.root, "one_step_off", *settings, "resume=auto")
    assert again.digest == run.digest and again.summary["failed"] == []
    assert again.metrics[-1]["evaluation/reward/mean"] > 0.0


def test_a_step_whose_groups_were_all_skipped_has_no_reward(down: Path, tmp_path: Path) -> None:
    """Skipped is not zero: null in the curves, counted in summary, warnings and `verify`, across a resume."""
    down.write_text("blue")
    data = f"data.train={prompts(tmp_path, 'train.txt', 'red', 'blue')}"
    settings = (*JUDGE, data, "data.shuffle=false", "prompts_per_step=1", "reward.on_error=skip", "max_staleness=0")
    settings = (*settings, "evaluate.max_prompts=1", "save.every=2")
    run = train(tmp_path / "run", "sync", *settings, "total_steps=4")
    check_skipped(run, steps=4)
    check_skipped(train(run.root, "sync", *settings, "total_steps=6", "resume=auto"), steps=6)


def check_skipped(run: Run, *, steps: int) -> None:
    rewards = run.column("reward/mean")
    assert [reward is None for reward in rewards] == [step % 2 == 1 for step in range(steps)]
    assert [line["staleness/max"] for line in run.metrics] == [None if r is None else 0 for r in rewards]
    half = steps // 2
    assert run.summary["skipped"] == {"tickets": half, "steps": half, "steps_without_reward": half, "optional_terms": 0}
    assert run.summary["warnings"][0].startswith(f"{half} tickets in {half} steps were skipped")
    assert (run.summary["reward_first"], run.summary["reward_last"]) == (rewards[0], rewards[-2])
    rows = {name: (ok, text) for name, ok, text in verify(run.root)}
    assert rows["exactly once"] == (True, f"{steps} tickets in {steps} steps, {half} of them skipped")
