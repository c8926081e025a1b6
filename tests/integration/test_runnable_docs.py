"""Tests that run every block of the documentation marked runnable, page by page, in a folder of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_rules

from async_flowrl import __main__ as verbs
from tests.support.examples import ROOT, Command, commands

BLOCK = re.compile(r"^<!-- runnable -->\n```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    page.relative_to(ROOT).as_posix(): blocks
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}

SMALLER = (
    "runtime.backend=local",
    "total_steps=2",
    "model.tiny.layers=1",
    "group_size=4",
    "trainer.micro_batch_size=4",
    "rollout.num_inference_steps=4",
    "evaluate.images_per_prompt=2",
)
"""Put behind the settings of each training; the slow lane runs it as it is written."""
INTERRUPTED = {"docs/do/resume.md"}
"""Pages whose runs are killed, for which they must be processes: in the slow lane only."""


def test_pages_have_runnable_blocks_and_each_mark_has_its_block() -> None:
    assert {"docs/learn/try_it.md", "docs/start/own_reward.md"} <= PAGES.keys()
    for page, blocks in PAGES.items():
        marks = (ROOT / page).read_text(encoding="utf-8").count("<!-- runnable -->")
        assert marks == len(blocks), f"{page}: a mark without a bash or python block right below it"


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


@pytest.mark.parametrize("page", sorted(PAGES.keys() - INTERRUPTED))
def test_runnable_blocks(page: str, reader: pytest.MonkeyPatch) -> None:
    """In this process, trained by its threads on fewer images: the blocks share a folder, as a reader's shell would."""
    for kind, text in PAGES[page]:
        if kind == "python":
            exec(compile(text, page, "exec"), {"__name__": "__main__"})
        for command in commands(text) if kind == "bash" else ():
            verb, *words = verb_and_arguments(command)
            more = SMALLER if verb == "train" else ()
            reader.setattr(sys, "argv", ["async-flowrl", verb, *words, *more])
            assert carried_out() == 0, f"{page}\n{text}"


def verb_and_arguments(command: Command) -> list[str]:
    program, *words = command.words
    if program == "async-flowrl":
        return words
    verbs_of = {f"async_flowrl.{module}": verb for verb, (module, _) in verbs.VERBS.items()}
    assert program == "python" and words[0] == "-m", f"{program} needs a shell: name the page in INTERRUPTED"
    return [verbs_of[words[1]], *words[2:]]


def carried_out() -> int:
    """Exit code of the verb in `sys.argv`."""
    try:
        return verbs.main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("page", PAGES)
def test_runnable_blocks_as_they_are_written(page: str, tmp_path: Path) -> None:
    """Each block is a process of its own, started by a shell, and each run has a cluster."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for kind, text in PAGES[page]:
        command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page}\n{text}\n{done.stdout}\n{done.stderr}"
