"""Every block of the documents that is marked runnable runs, page by page, in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^<!-- runnable -->\n```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    page.relative_to(ROOT).as_posix(): blocks
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
    if (blocks := BLOCK.findall(page.read_text(encoding="utf-8")))
}

SLOW = {"docs/do/resume.md"}
"""Pages with several whole runs."""
CASES = [pytest.param(page, marks=pytest.mark.slow if page in SLOW else ()) for page in PAGES]


def test_pages_have_runnable_blocks_and_each_mark_has_its_block() -> None:
    assert {"docs/learn/try_it.md", "docs/start/own_reward.md"} <= PAGES.keys()
    for page, blocks in PAGES.items():
        marks = (ROOT / page).read_text(encoding="utf-8").count("<!-- runnable -->")
        assert marks == len(blocks), f"{page}: a mark without a bash or python block right below it"


@pytest.mark.parametrize("page", CASES)
def test_runnable_blocks(page: str, tmp_path: Path) -> None:
    """The blocks share a folder, as a reader's shell would; each is a process of its own."""
    commands = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    for kind, text in PAGES[page]:
        command = [sys.executable, "-c", text] if kind == "python" else ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{page}\n{text}\n{done.stdout}\n{done.stderr}"
