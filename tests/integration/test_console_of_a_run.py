"""Tests of the output of a real run in a pipe and with little output."""

import json
import logging
import os
import re
import shlex
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.config.compose import composed, typed
from async_flowrl.main import record
from async_flowrl.run.job import run as run_config
from benchmarks.disturbed import split, workers
from tests.integration.runs import LOCAL, ROOT


def run(*overrides: str) -> int:
    """A run of this process, with what a command line leaves in `.hydra/`."""
    disturbance, settings = split(overrides)
    values = composed("one_step_off", [*LOCAL, *settings])
    config = typed(values)
    return run_config(config, record(values, values.hydra, config.output_dir), workers=workers(disturbance))


def test_the_screens_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """First lines, steps and evaluations, and the last screen."""
    folder = tmp_path / "run"
    wanted = ("console=auto", f"output_dir={folder}", "total_steps=2", "evaluate.before_training=true")
    assert run(*wanted, "evaluate.every=2") == exit_codes.OK
    lines = capfd.readouterr().out.splitlines()
    labels = [line.split()[0] for line in lines if re.match(r"\w+ ", line)]
    first = ["run", "model", "training", "evaluation", "reward", "devices", "files"]
    assert labels[: len(first)] == first
    text = "\n".join(lines)
    assert "one_step_off: the next step is generated while one is" in text
    assert "tiny (qwen_image, float32, 32 px), LoRA of rank 8" in text
    assert [line.split(":")[0] for line in lines if line.startswith("evaluation of")] == [
        "evaluation of version 0",
        "evaluation of version 2",
    ]
    assert [line.split(" |")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert re.search(r"^result   On 2 training prompts, the reward went from ", text, re.MULTILINE)
    for label, path in (("LoRA", "lora"), ("images", "images"), ("summary", "summary.json")):
        assert f"{label:8} {folder}/{path}" in text
        assert (folder / path).exists()
    assert "report  " not in text, "monitor.report=false writes none"
    shown = min(str(folder), os.path.relpath(folder, ROOT), key=len)
    assert f"async-flowrl generate --lora {shown}/lora --prompt 'red red red red' --out {shown}/before_" in text
    assert f"async-flowrl evaluate {shown}" in text


def test_a_run_that_is_stopped_says_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a pipe: plain lines, one per step; then the command that its last line names."""
    folder, limit = tmp_path / "a_run", ("time_limit=4", "disturb.update=0.5", "console=auto")
    assert run("total_steps=200", f"output_dir={folder}", "data.train='a b.txt'", *limit) == exit_codes.CONFIG
    assert run("total_steps=200", f"output_dir={folder}", "resume=auto", *limit) == exit_codes.RESUMABLE
    out = capfd.readouterr().out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert steps and "\x1b" not in out
    form = r"step (\d+)/200 \| reward -?\d\.\d{4} \| staleness [01] \| \d+\.\d\d s/step \| ETA (\d+:)?\d+:\d\d"
    found = [re.fullmatch(form, line) for line in steps]
    assert [int(match[1]) for match in found if match] == list(range(1, len(steps) + 1))
    (command,) = (line.removeprefix("next").strip() for line in out.splitlines() if line.startswith("next "))
    assert command.startswith("async-flowrl train --config-name one_step_off ")
    assert {"total_steps=200", f"output_dir={folder}"} <= set(shlex.split(command))
    assert command.endswith(" console=auto resume=auto") and command.count("resume") == 1


def test_quiet_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run of two steps, and its refusal when it is started again."""
    wanted = ("console=quiet", "total_steps=2", f"output_dir={tmp_path / 'run'}")
    assert run(*wanted) == exit_codes.OK
    assert tuple(capfd.readouterr()) == ("", "")
    assert run(*wanted) == exit_codes.CONFIG
    said = capfd.readouterr()
    assert said.out == "" and "is not empty" in said.err


def test_a_run_in_this_process_leaves_no_log_file_open(tmp_path: Path) -> None:
    """Whoever logs afterwards would bring the file back, or fail where its folder was moved."""
    assert run(f"output_dir={tmp_path / 'run'}", "total_steps=1", "console=quiet") == exit_codes.OK
    assert (tmp_path / "run/logs/controller.log").stat().st_size > 0
    assert not [handler for handler in logging.getLogger().handlers if type(handler) is logging.FileHandler]


def test_a_warning_of_a_step_is_in_the_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert run(f"output_dir={folder}", "total_steps=2", "trainer.learning_rate=0.3") == exit_codes.OK
    (warned,) = (w for w in json.loads((folder / "summary.json").read_text())["warnings"] if "kl_per_update" in w)
    assert warned.startswith("step ")
    said = capfd.readouterr()
    assert warned.split(":")[1][:30] in " ".join(said.out.split())
