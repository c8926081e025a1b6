"""Tests of a resume with changed inputs: edited prompts are refused, an edited reward warns, `verify` reports force."""

import json
from pathlib import Path

import pytest

from async_flowrl.cli.verify import verify
from async_flowrl.config.compose import compose_config
from async_flowrl.main import train
from tests.integration.runs import LOCAL

REWARD = "def mean(images, prompt):\n    return [float(image.mean()) / 255 for image in images]\n"
STEPS = 1


def go(folder: Path, *overrides: str) -> int:
    small = ("model.tiny.layers=1", "rollout.num_inference_steps=3", "save.every=1", "console=lines")
    own = "reward.terms={mean: {name: 'bright_inputs:mean'}}"
    prompts = (f"data.train={folder / 'train.txt'}", f"data.evaluation={folder / 'test.txt'}")
    arguments = [*LOCAL, *small, *prompts, own, f"output_dir={folder / 'run'}", *overrides]
    return train(compose_config("one_step_off", arguments), dict)


def events(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == "inputs"]


def inputs_row(folder: Path) -> tuple[bool, str]:
    return next((holds, said) for name, holds, said in verify(folder / "run") if name == "inputs")


@pytest.mark.extended
def test_a_resume_sees_what_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "bright_inputs.py").write_text(REWARD)
    train, test = tmp_path / "train.txt", tmp_path / "test.txt"
    train.write_text("a cat\na dog\na cat\n")
    test.write_text("a cow\n")
    assert go(tmp_path, f"total_steps={STEPS}") == 0
    said = capsys.readouterr().out
    assert f"training   3 prompts of {train}, 1 of them duplicates by their text\n" in said
    assert f"evaluation 1 held-out prompt, of {test}\n" in said
    assert "reward     1 × mean (bright_inputs:mean)\n" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluation_prompts"] == "held_out" and summary["warnings"] == []
    assert (summary["prompts"]["train"], summary["prompts"]["duplicates"]) == (3, 1)
    assert inputs_row(tmp_path) == (True, f"3 training prompts, data.train={train} is unchanged")

    before = (tmp_path / "run" / "config.yaml").read_text()
    train.write_text("a cat\na fox\na cat\n")
    assert "was edited since" in inputs_row(tmp_path)[1]
    assert go(tmp_path, f"total_steps={STEPS + 1}", "resume=auto") == 2
    first, prompts, last = capsys.readouterr().err.splitlines()
    assert f"the training prompts of data.train={train} are not those it was made with (still 3)" in prompts
    assert f"step_{STEPS}" in first and last.endswith("resume=force goes on all the same")
    assert (tmp_path / "run" / "config.yaml").read_text() == before

    test.write_text("a fox\n")
    (tmp_path / "bright_inputs.py").write_text(REWARD + "# another one\n")
    assert go(tmp_path, f"total_steps={STEPS + 1}", "resume=force") == 0
    warned = capsys.readouterr().err
    assert f"resume=force: {tmp_path / 'run'}" in warned
    assert "the source file of the reward 'mean', or its server's command, has changed" in warned
    assert "the prompts of evaluations have changed" in warned
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == STEPS + 1 and summary["evaluation_prompts"] == "training"
    assert summary["prompts"]["evaluation_trained"] == 1
    assert any(sentence.startswith("resume=force: ") for sentence in summary["warnings"])
    holds, said = inputs_row(tmp_path)
    assert not holds and said.startswith("resume=force: ") and "are not those it was made with" in said
    assert [len(event["forced"]) for event in events(tmp_path)] == [0, 1]  # type: ignore[arg-type]

    # The next checkpoint is one of the prompts that are trained now, so nothing has to be forced any more.
    assert go(tmp_path, f"total_steps={STEPS + 2}", "resume=auto") == 0
    assert go(tmp_path, f"total_steps={STEPS + 2}", "resume=auto", "lora.alpha=3") == 2
    assert "lora.alpha was" in capsys.readouterr().err

    # All steps are made: its files stay as they are.
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.json*")}
    for steps in (STEPS, STEPS + 2):
        assert go(tmp_path, f"total_steps={steps}", "resume=auto") == 0
        assert len(capsys.readouterr().out.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in written} == written
