"""Tests of the output of a real run in a pipe and with little output."""

import os
import re
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.config.compose import composed, typed
from async_flowrl.main import record, train
from tests.integration.runs import LOCAL, ROOT


def test_the_screens_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First lines, steps and evaluations, and the last screen."""
    folder = tmp_path / "run"
    wanted = ("console=auto", f"output_dir={folder}", "total_steps=2", "evaluate.before_training=true")
    values = composed("one_step_off", [*LOCAL, *wanted, "evaluate.every=2"])
    config = typed(values)
    assert train(config, lambda: record(values, values.hydra, config.output_dir)) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    labels = [line.split()[0] for line in lines if re.match(r"\w+ ", line)]
    first = ["run", "model", "training", "evaluation", "reward", "devices", "files"]
    assert labels[: len(first)] == first
    text = "\n".join(lines)
    assert [line.split(":")[0] for line in lines if line.startswith("evaluation of")] == [
        "evaluation of version 0",
        "evaluation of version 2",
    ]
    assert [line.split(" |")[0] for line in lines if line.startswith("step ")] == ["step 1/2", "step 2/2"]
    assert re.search(r"^result   On 2 training prompts, the reward went from ", text, re.MULTILINE)
    shown = min(str(folder), os.path.relpath(folder, ROOT), key=len)
    for label, path in (("LoRA", "lora"), ("images", "images"), ("summary", "summary.json")):
        assert f"{label:8} {shown}/{path}" in text
        assert (folder / path).exists()
    assert "report  " not in text, "monitor.report=false writes none"
    assert f"async-flowrl generate --lora {shown}/lora --prompt 'red red red red' --out {shown}/before_" in text
    assert f"async-flowrl evaluate {shown}" in text
