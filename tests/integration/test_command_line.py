"""Tests of the command line besides a plain run: options of Hydra, a sweep, and the console command."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl import __main__ as verbs
from async_flowrl import main as program
from tests.integration.runs import LIMIT, ROOT, TINY, Run, exit_code

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
        return exit_code(of)

    return ran


@pytest.mark.extended
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


@pytest.mark.extended
def test_a_good_configuration_leaves_stderr_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path))  # it builds the model, for which it imports the pipeline
    done = command("train", "model=tiny_sd3", "dry_run=true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("device", ["H100", "0", "-80"])
def test_a_card_is_given_by_its_memory(
    device: str, here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("plan", "--memory", f"--device={device}", of=verbs.main) == 2
    assert f"80, got {device}" in capsys.readouterr().err


def test_the_console_command_itself(here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    done = command("verify_")
    assert (done.returncode, done.stdout) == (2, "") and "did you mean 'verify'" in done.stderr
    assert here(of=verbs.main) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in verbs.VERBS)
    assert here("--version", of=verbs.main) == 0 and capsys.readouterr().out.startswith("async-flowrl ")


@pytest.mark.parametrize("verb", verbs.VERBS)
def test_every_verb_says_how_it_is_used(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["async-flowrl", verb, "--help"])
    with pytest.raises(SystemExit) as end:
        sys.exit(verbs.main())
    said = capsys.readouterr()
    assert end.value.code in (0, None), said.err
    assert f"usage: async-flowrl {verb} " in said.out or f"usage: python -m {verbs.VERBS[verb][0]} " in said.out
    assert len(said.out.splitlines()) >= 3 and not said.err
    assert not list(tmp_path.iterdir())


HEAVY = ("torch", "diffusers", "transformers", "peft", "ray", "scipy", "matplotlib", "wandb", "tensorboard", "rapidocr")
ANSWERS = """
import contextlib, importlib, io, json, sys
for name, (module, arguments) in json.loads(sys.argv[1]).items():
    before, sys.argv = set(sys.modules), ["command", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            code = importlib.import_module(f"async_flowrl.{module}").main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([name, [code, said.getvalue(), sorted(set(sys.modules) - before)]]))
"""
NO_COMPUTING = {
    "no verb": ("__main__", []),
    "version": ("__main__", ["--version"]),
    "unknown verb": ("__main__", ["nonsense"]),
    "help of the export": ("cli.export", ["--help"]),
    "arguments of the export": ("cli.export", ["only_one"]),
    "help of the planner": ("cli.plan", ["--help"]),
    "unknown key": ("main", ["total_stepz=3"]),
    "unknown mode": ("main", ["mode=one_step"]),
    "out of bounds": ("main", ["total_steps=0"]),
    "unknown reward": ("main", ["reward.terms.color.name=ocrr"]),
    "missing prompts": ("main", ["data.train=/nowhere/prompts.txt"]),
    "missing model": ("main", ["model.path=/nowhere/model"]),
    "used directory": ("main", [f"output_dir={ROOT}"]),
}
"""What can be answered without a tensor."""
ANSWERED = {name for name in NO_COMPUTING if "help" in name} | {"no verb", "version"}


@pytest.mark.extended
def test_an_answer_that_needs_no_tensor_loads_no_torch() -> None:
    """All are asked in one process; a module counts for the case that is the first to load it."""
    command = [sys.executable, "-c", ANSWERS, json.dumps(NO_COMPUTING)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    answers = dict(map(json.loads, done.stdout.splitlines()))
    assert answers.keys() == NO_COMPUTING.keys()
    for case, (code, said, modules) in answers.items():
        assert code == (0 if case in ANSWERED else 2), said
        assert "Traceback" not in said
        assert not {name.partition(".")[0] for name in modules} & set(HEAVY), case
