"""Tests of a resume with changed inputs: edited prompts are refused, an edited reward warns, `verify` reports force."""

from pathlib import Path

import pytest

from async_flowrl.cli.verify import verify
from tests.integration.runs import Run, train

REWARD = "def mean(images, prompt):\n    return [float(image.mean()) / 255 for image in images]\n"


def go(folder: Path, steps: int, *overrides: str, code: int = 0) -> Run:
    own = "reward.terms={mean: {name: 'bright_inputs:mean'}}"
    prompts = (f"data.train={folder / 'train.txt'}", f"data.evaluation={folder / 'test.txt'}")
    settings = ("save.every=1", *prompts, own, f"total_steps={steps}", *overrides)
    return train(folder / "run", "one_step_off", *settings, code=code)


def inputs_row(folder: Path) -> tuple[bool, str]:
    return next((holds, said) for name, holds, said in verify(folder / "run") if name == "inputs")


@pytest.mark.extended
def test_a_resume_sees_what_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bright_inputs.py").write_text(REWARD)
    training, test = tmp_path / "train.txt", tmp_path / "test.txt"
    training.write_text("a cat\na dog\na cat\n")
    test.write_text("a cow\n")
    summary = go(tmp_path, 1).summary
    said = capsys.readouterr().out
    assert f"training   3 prompts of {training}, 1 of them duplicates by their text\n" in said
    assert f"evaluation 1 held-out prompt, of {test}\n" in said
    assert "reward     1 × mean (bright_inputs:mean)\n" in said
    assert summary["evaluation_prompts"] == "held_out" and summary["warnings"] == []
    assert (summary["prompts"]["train"], summary["prompts"]["duplicates"]) == (3, 1)
    assert inputs_row(tmp_path) == (True, f"3 training prompts, data.train={training} is unchanged")

    before = (tmp_path / "run" / "config.yaml").read_text()
    training.write_text("a cat\na fox\na cat\n")
    assert "was edited since" in inputs_row(tmp_path)[1]
    go(tmp_path, 2, "resume=auto", code=2)
    first, prompts, last = capsys.readouterr().err.splitlines()
    assert f"the training prompts of data.train={training} are not those it was made with (still 3)" in prompts
    assert "step_1" in first and last.endswith("resume=force goes on all the same")
    assert (tmp_path / "run" / "config.yaml").read_text() == before

    test.write_text("a fox\n")
    (tmp_path / "bright_inputs.py").write_text(REWARD + "# another one\n")
    forced = go(tmp_path, 2, "resume=force")
    warned = capsys.readouterr().err
    assert f"resume=force: {tmp_path / 'run'}" in warned
    assert "the source file of the reward 'mean', or its server's command, has changed" in warned
    assert "the prompts of evaluations have changed" in warned
    summary = forced.summary
    assert summary["steps"] == 2 and summary["evaluation_prompts"] == "training"
    assert summary["prompts"]["evaluation_trained"] == 1
    assert any(sentence.startswith("resume=force: ") for sentence in summary["warnings"])
    holds, said = inputs_row(tmp_path)
    assert not holds and said.startswith("resume=force: ") and "are not those it was made with" in said
    assert [len(event["forced"]) for event in forced.events if event["event"] == "inputs"] == [0, 1]

    # The next checkpoint is one of the prompts that are trained now, so nothing has to be forced any more.
    go(tmp_path, 3, "resume=auto")
    go(tmp_path, 3, "resume=auto", "lora.alpha=3", code=2)
    assert "lora.alpha was" in capsys.readouterr().err

    # All steps are made: its files stay as they are.
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.json*")}
    for steps in (1, 3):
        go(tmp_path, steps, "resume=auto")
        assert len(capsys.readouterr().out.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in written} == written
