"""Tests of the commands in the examples' READMEs: CPU commands run; GPU commands are composed, checked and prepared."""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from async_flowrl import __main__ as verbs
from async_flowrl.config import exit_codes
from async_flowrl.config.compose import compose_config, is_hydras
from async_flowrl.main import command_line
from tests.support.examples import ROOT, SHORT, Block, Command, blocks, commands
from tests.support.published import MODELS, use_published_models

BLOCKS = blocks()
LATER = ("sweep-0", "flux-1", "deploy-0")
"""Blocks that only the slow lane runs: of a sweep, of a run of FLUX.1 and of `doctor` there are other tests
(test_command_line.py, test_model_families.py, test_doctor_of_a_configuration.py)."""
QUICK = [
    pytest.param(block, id=str(block), marks=pytest.mark.slow if str(block) in LATER else ())
    for block in BLOCKS
    if block.mark == "cpu"
]
FOLDERS = sorted({block.folder for block in BLOCKS if block.mark.startswith("cpu")})
GPU = [block for block in BLOCKS if block.mark == "gpu"]
LIMIT = 1800.0
"""Seconds of a whole block in the slow lane."""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like the root of a clone, with outputs of its own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def carry_out(command: Command, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """A command in this process, as a shell in the clone would run it; `more` goes behind those of `train`."""
    program, *words = command.words
    if program == "python":
        path, words, run = words[0], [*words], runpy.run_path
    else:
        assert program == "async-flowrl", f"{program} is not run without a shell: mark the block `cpu, slow`"
        path, words, run = "async-flowrl", [program, *words, *(more if words[0] == "train" else ())], None
    monkeypatch.setattr(sys, "argv", words)
    for name, value in command.environment.items():
        assert name == "PYTHONPATH"
        monkeypatch.syspath_prepend(str(Path(value).resolve()))
    try:
        if run is None:
            return verbs.main()
        run(path, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return exit_codes.OK


def test_every_example_has_commands_and_every_block_says_where_it_runs() -> None:
    folders = {path.parent.name for path in (ROOT / "examples").glob("*/README.md")}
    assert folders == {
        path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] not in "_."
    }
    assert {block.folder for block in BLOCKS} >= folders - {"reward_servers", "other_reward_servers"}
    assert all(block.mark for block in BLOCKS), [str(block) for block in BLOCKS if not block.mark]
    for folder in folders:
        text = (ROOT / "examples" / folder / "README.md").read_text(encoding="utf-8")
        if any(block.folder == folder and block.mark == "gpu" for block in BLOCKS):
            assert re.search(r"[Nn]ot run", text), f"{folder}: no GPU has run this, and its README must say so"
        if any(block.folder == folder and block.mark != "gpu" for block in BLOCKS):
            assert "Expected" in text, f"{folder}: what to expect, and when"


@pytest.mark.parametrize("block", QUICK)
def test_it_runs(block: Block, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened, in this process."""
    for command in commands(block.text):
        assert carry_out(command, SHORT, monkeypatch) == exit_codes.OK, command.words
    trained = [command for command in commands(block.text) if command.words[:2] == ("async-flowrl", "train")]
    summaries = list(clone.glob("outputs/**/summary.json"))
    assert block.folder != "sweep" or (clone / "outputs" / "sweep" / "report.html").exists()
    assert len(summaries) >= len(trained) > 0


def test_what_only_the_slow_lane_runs_composes() -> None:
    """Of a sweep, its first job."""
    found = {str(block): commands(block.text) for block in BLOCKS if str(block) in LATER}
    assert found.keys() == set(LATER)
    for program, *words in (command.words for each in found.values() for command in each):
        given, _ = command_line(words[1:])
        assert program == "async-flowrl" and words[0] in ("train", "doctor") and given.overrides
        first = [override.partition(",")[0] for override in given.overrides if not is_hydras(override)]
        assert compose_config(given.config_name, first).total_steps > 1


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_it_runs_as_it_is_written(folder: str, clone: Path) -> None:
    """All of a page in order, by bash, with every step; loops, servers in the background and sweeps included."""
    for block in BLOCKS:
        if block.folder == folder and block.mark != "gpu":
            shell(block.text, clone)


def shell(text: str, folder: Path) -> None:
    commands_here = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{commands_here}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("block", GPU, ids=str)
def test_what_is_for_gpus_composes_and_would_run(block: Block, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dry_run=true` goes as far as the models' own configurations; prompt files of others are stood in for."""
    use_published_models(clone / "hub", monkeypatch)
    for command in commands(block.text):
        for path in re.findall(r"data\.\w+=(\S+)", shlex.join(command.words)):
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text('a sign that says "OPEN"\n' if "test" in path else 'a shop called "BLUE"\n')
        out = io.StringIO()
        with redirect_stdout(out):
            assert carry_out(command, ("dry_run=true",), monkeypatch) == exit_codes.OK, command.words
        assert any(f"{model} (" in out.getvalue() for model in MODELS), out.getvalue()
