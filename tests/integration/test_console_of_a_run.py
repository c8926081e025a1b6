"""Tests of the output of a real run on a terminal, in a pipe, with little output, and after Ctrl-C."""

import logging
import os
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.config.compose import composed, typed
from async_flowrl.main import record
from async_flowrl.run.job import run as run_config
from benchmarks.disturbed import split, workers
from tests.integration.runs import LOCAL, ROOT
from tests.support.forked import python
from tests.support.terminal import Terminal

COMMAND = ["-m", "benchmarks.disturbed", "--config-name", "one_step_off", *LOCAL]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Its name leaves room in lines of 80 columns; pytest's own folders have names of any length."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield Path(folder)


def test_the_screens_of_a_run(short_folder: Path) -> None:
    """First lines, panel and last screen, as they stand on a terminal of 80 columns at the end.

    The process is forked; as people start it, it is seen in tests/unit/observability/test_panel_in_terminal.py."""
    folder = short_folder / "run"
    overrides = ["console=auto", f"output_dir={folder}", "evaluate.before_training=true", "evaluate.every=5"]
    terminal = Terminal([*python()[1:], *COMMAND, *overrides], 80, 50)
    assert terminal.end() == exit_codes.OK and terminal.was_sane, terminal.text
    lines = [*terminal.above, *terminal.lines]
    assert max(map(len, lines)) <= 80
    names = [name for line in lines if (name := line[:10].strip(" ─")) and not line.startswith("evaluation of")]
    first = ["run", "model", "training", "evaluation", "reward", "devices", "files", "predicted", "predicted"]
    assert names[: len(first)] == first
    assert "one_step_off: the next step is generated while one is" in " ".join(" ".join(lines).split())
    assert "tiny (qwen_image, float32, 32 px), LoRA of rank 8" in terminal.text
    assert f"async-flowrl report {folder} --live".replace(" ", "") in "".join("".join(lines).split())
    assert "no step time: no earlier steps here" in terminal.text and "no memory: no GPU to plan" in terminal.text
    panel = next(n for n, line in enumerate(lines) if line.startswith("── one_step_off ─"))
    assert [line[:10].strip() for line in lines[panel + 1 : panel + 9]] == [
        *("step", "reward", "evaluated", "staleness", "rollout", "trainer", "rewards", "speed")
    ]
    assert "5/5" in lines[panel + 1] and "ETA 0:00" in lines[panel + 1]
    assert "1 of at most 1" in lines[panel + 4]
    last = "\n".join(lines[panel + 9 :])
    assert re.search(r"^result   On 2 training prompts, the reward went from ", last, re.MULTILINE)
    for label, path in (("LoRA", "lora"), ("images", "images"), ("summary", "summary.json")):
        assert f"{label:8} {folder}/{path}"[:80] in last
        assert (folder / path).exists()
    assert "report  " not in last, "monitor.report=false writes none"
    joined = "".join(last.split())  # long lines are wrapped wherever the width ends
    shown = min(str(folder), os.path.relpath(folder, ROOT), key=len)
    following = f"next async-flowrl generate --lora {shown}/lora --prompt 'red red red red' --out {shown}/before_"
    assert following.replace(" ", "") in joined
    assert f"async-flowrl evaluate {shown}".replace(" ", "") in joined


def run(*overrides: str) -> int:
    """A run of this process, with what a command line leaves in `.hydra/`."""
    disturbance, settings = split(overrides)
    values = composed("one_step_off", [*LOCAL, *settings])
    config = typed(values)
    return run_config(config, record(values, values.hydra, config.output_dir), workers=workers(disturbance))


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


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path, presses: int) -> None:
    overrides = ["console=auto", f"output_dir={tmp_path / 'run'}", "total_steps=500", "disturb.update=0.3"]
    terminal = Terminal([*COMMAND, *overrides, "save.every=1"])
    terminal.until(lambda t: re.search(r"^step +[3-9]/", t.text, re.MULTILINE) is not None, "a third step")
    for _ in range(presses):
        terminal.child.sendintr()
    code = terminal.end()
    assert code in (exit_codes.INTERRUPTED, -signal.SIGINT) and terminal.was_sane
    if presses == 1:
        assert terminal.lines[-1] == "async_flowrl: interrupted"
        assert "resume=auto (goes on from step " in "".join(line.rstrip() for line in terminal.lines).replace("\n", "")


def test_a_run_in_this_process_leaves_no_log_file_open(tmp_path: Path) -> None:
    """Whoever logs afterwards would bring the file back, or fail where its folder was moved."""
    assert run(f"output_dir={tmp_path / 'run'}", "total_steps=1", "console=quiet") == exit_codes.OK
    assert (tmp_path / "run/logs/controller.log").stat().st_size > 0
    assert not [handler for handler in logging.getLogger().handlers if type(handler) is logging.FileHandler]
