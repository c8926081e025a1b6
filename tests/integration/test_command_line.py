"""Tests of the command line besides a plain run: options of Hydra, a sweep, and the console command."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl import __main__ as verbs
from async_flowrl import main as program
from tests.integration.runs import LIMIT, ROOT, TINY, Run

SMALL = (*TINY, "runtime.backend=local", "total_steps=1")


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command_line = [sys.executable, "-m", "async_flowrl", *arguments]
    return subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The exit code of a command line in this process: importing torch takes longer than most of them."""

    def ran(*arguments: str, of: Callable[[], int] = program.main) -> int:
        monkeypatch.setattr(sys, "argv", ["main", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        try:
            return of()
        except SystemExit as end:
            return int(end.code or 0)

    return ran


def test_a_sweep_runs_every_job_in_a_folder_of_its_own_and_tells_which_failed(
    here: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swept = ("total_steps=1,0,2", "monitor.report=true", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert here("--multirun", *SMALL, *swept) == 2
    done = capsys.readouterr()
    assert done.err == "async_flowrl: total_steps must be at least 1, got 0\n"
    assert [Run(tmp_path / "sweep" / job).summary["steps"] for job in ("0", "2")] == [1, 2]
    assert done.out.splitlines()[-1] == f"report   {tmp_path / 'sweep' / 'report.html'}: 2 of 3 runs"
    assert "<title>2 runs</title>" in (tmp_path / "sweep" / "report.html").read_text()


@pytest.mark.parametrize(("codes", "whole"), [((3, 2), 2), ((1, 2), 1), ((0, 0), 0), ((3, 0), 3)])
def test_the_exit_code_of_a_sweep_is_that_of_its_worst_job(codes: tuple[int, int], whole: int) -> None:
    assert program.worst(codes) == program.worst(codes[::-1]) == whole


def test_the_console_command_runs_every_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    for verb, (module, _) in verbs.VERBS.items():
        program = importlib.import_module(f"async_flowrl.{module}")
        monkeypatch.setattr(program, "main", lambda: 0)
        monkeypatch.setattr(sys, "argv", ["async-flowrl", verb, "--help"])
        assert verbs.main() == 0 and sys.argv[1:] == ["--help"]


def test_the_console_command_itself(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    done = command("verify_")
    assert done.returncode == 2 and "did you mean 'verify'" in done.stderr
    assert here(of=verbs.main) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in verbs.VERBS)
    assert here("--version", of=verbs.main) == 0 and capsys.readouterr().out.startswith("async-flowrl ")
    assert here("export", "--help", of=verbs.main) == 0 and "usage: " in capsys.readouterr().out
