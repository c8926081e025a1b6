"""Tests that run the commands and the code of documents: marked blocks, the examples' pages, and those on exports."""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_rules

from async_flowrl import __main__ as verbs
from async_flowrl.config import exit_codes
from async_flowrl.config.schema import Config, ModelConfig, RewardTerm
from async_flowrl.policies import lora_file
from async_flowrl.policies.registry import resolve_model
from tests.integration.exported import LORA, run_directory, write_config
from tests.integration.runs import exit_code
from tests.support.examples import ROOT, SHORT, Block, Command, blocks, commands
from tests.support.published import MODELS, use_published_models
from tests.support.tiny import adapted_policy, save_lora

BLOCK = re.compile(r"^<!-- runnable -->\n```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    page.relative_to(ROOT).as_posix(): found
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if (found := BLOCK.findall(page.read_text(encoding="utf-8")))
}

SMALLER = tuple(word for word in SHORT if not word.startswith(("evaluate.every=", "evaluate.before", "save.every=")))
"""Put behind the settings of each training; the slow lane runs it as it is written."""
EXTENDED = {"docs/do/report.md", "docs/start/own_editing_reward.md"}
"""Pages whose blocks are run by `make test-extended`, and not by `make test`."""
INTERRUPTED = {"docs/do/resume.md"}
"""Pages whose runs are killed, for which they must be processes: in the slow lane only."""


def test_pages_have_runnable_blocks_and_each_mark_has_its_block() -> None:
    assert {"docs/learn/try_it.md", "docs/start/own_reward.md"} <= PAGES.keys()
    for page, found in PAGES.items():
        marks = (ROOT / page).read_text(encoding="utf-8").count("<!-- runnable -->")
        assert marks == len(found), f"{page}: a mark without a bash or python block right below it"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A working directory from which modules can be imported, and none of whose modules is left behind.

    Images that are edited have a 16th of the tokens.
    """
    monkeypatch.setattr(stock_rules, "VAE_IMAGE_SIZE", 256**2)
    monkeypatch.setattr(stock_rules, "CONDITION_IMAGE_SIZE", 112**2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield monkeypatch
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.extended] if page in EXTENDED else [])
        for page in sorted(PAGES.keys() - INTERRUPTED)
    ],
)
def test_runnable_blocks(page: str, reader: pytest.MonkeyPatch) -> None:
    """In this process, trained by its threads on fewer images: the blocks share a folder, as a reader's shell would."""
    for kind, text in PAGES[page]:
        if kind == "python":
            exec(compile(text, page, "exec"), {"__name__": "__main__"})
        for command in commands(text) if kind == "bash" else ():
            assert carry_out(command, SMALLER, reader) == exit_codes.OK, f"{page}\n{text}"


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("page", PAGES)
def test_runnable_blocks_as_they_are_written(page: str, tmp_path: Path) -> None:
    """Each block is a process of its own, started by a shell, and each run has a cluster."""
    for kind, text in PAGES[page]:
        shell(text if kind == "bash" else f"python -c {shlex.quote(text)}", tmp_path)


BLOCKS = blocks()
LATER = ("sweep-0", "flux-1", "deploy-0")
"""Blocks that only the slow lane runs, and others try with `dry_run=true`: of a sweep, of a run of FLUX.1 and of
`doctor` there are other tests (test_command_line.py, test_model_families.py, test_doctor_of_a_configuration.py)."""
QUICK = [block for block in BLOCKS if block.mark == "cpu" and str(block) not in LATER]
FOLDERS = sorted({block.folder for block in BLOCKS if block.mark.startswith("cpu")})
TRIED = [block for block in BLOCKS if block.mark == "gpu" or str(block) in LATER]
LIMIT = 1800.0
"""Seconds of a whole block in the slow lane."""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that looks like the root of a clone, with outputs of its own."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def carry_out(command: Command, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """A command in this process, as a shell would run it; `more` goes behind the words of `train`."""
    program, *words = command.words
    if words[0] == "-m":
        modules = {f"async_flowrl.{module}": verb for verb, (module, _) in verbs.VERBS.items()}
        program, words = "async-flowrl", [modules[words[1]], *words[2:]]
    if program == "python":

        def run() -> int:
            runpy.run_path(words[0], run_name="__main__")
            return exit_codes.OK
    else:
        assert program == "async-flowrl", f"{program} needs a shell: `cpu, slow`, or its page in INTERRUPTED"
        run, words = verbs.main, [program, *words, *(more if words[0] == "train" else ())]
    monkeypatch.setattr(sys, "argv", words)
    for name, value in command.environment.items():
        assert name == "PYTHONPATH"
        monkeypatch.syspath_prepend(str(Path(value).resolve()))
    return exit_code(run)


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


@pytest.mark.parametrize("block", QUICK, ids=str)
def test_it_runs(block: Block, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened, in this process."""
    for command in commands(block.text):
        assert carry_out(command, SHORT, monkeypatch) == exit_codes.OK, command.words
    trained = [command for command in commands(block.text) if command.words[:2] == ("async-flowrl", "train")]
    summaries = list(clone.glob("outputs/**/summary.json"))
    assert len(summaries) >= len(trained) > 0


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("folder", FOLDERS)
def test_it_runs_as_it_is_written(folder: str, clone: Path) -> None:
    """All of a page in order, by bash, with every step; loops, servers in the background and sweeps included."""
    for block in BLOCKS:
        if block.folder == folder and block.mark != "gpu":
            shell(block.text, clone)


def shell(text: str, folder: Path) -> None:
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.extended
@pytest.mark.parametrize("block", TRIED, ids=str)
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
        assert block.mark == "cpu" or any(f"{model} (" in out.getvalue() for model in MODELS), out.getvalue()


COMMAND = re.compile(r"^    async-flowrl (export|evaluate|generate) (.*)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for RUN, OUT, FOLDER and PROMPTS: a run with one image per prompt."""
    root = tmp_path_factory.mktemp("docs")
    policy = adapted_policy(config=LORA)
    run = root / "run"
    run_directory(run, policy, ema=False)
    save_lora(run / "lora", policy.transformer, alpha=LORA.alpha)
    config = Config(lora=LORA)
    config.reward.terms = {"color": RewardTerm()}
    config.evaluate.images_per_prompt, config.evaluate.num_inference_steps = 1, 2
    write_config(run, config)
    prompts = root / "mine.txt"
    prompts.write_text("red\n")
    named = {"RUN": run, "OUT": root / "out", "FOLDER": root / "found", "PROMPTS": prompts}
    return {name: str(path) for name, path in named.items()}


def filled(text: str, places: dict[str, str], base: str) -> str:
    return re.sub(r"\b(RUN|OUT|FOLDER|PROMPTS|BASE)\b", lambda match: (places | {"BASE": base})[match[1]], text)


@pytest.mark.extended
def test_they_do_what_they_say(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, one on what the other left; each page's Python after its commands."""
    out, folder = Path(places["OUT"]), resolve_model(ModelConfig()).path
    for page, least in (("export.md", 6), ("evaluate_command.md", 3)):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        commands = COMMAND.findall(text)
        assert len(commands) >= least
        for verb, arguments in commands:
            if "--merged" in arguments and (out / "merged").exists():
                continue
            words = shlex.split(filled(arguments, places, "tiny"))
            monkeypatch.setattr("sys.argv", ["async-flowrl", verb, *words])
            assert exit_code(verbs.main) == 0, arguments
        for block in PYTHON.findall(text):
            held: dict[str, object] = {}
            exec(compile(filled(block.replace("(BASE)", '("BASE")'), places, folder), page, "exec"), held)
            transformer = held["pipe"].transformer  # type: ignore[attr-defined]
            assert isinstance(transformer, torch.nn.Module)
    assert {"README.md", "peft", "comfyui.safetensors", "kohya.safetensors", "merged", "again", "grid.png"} <= {
        entry.name for entry in out.iterdir()
    }
    again = lora_file.read(out / "again").tensors
    assert all(torch.equal(t, again[n]) for n, t in lora_file.read(out).tensors.items())
