"""Test of `make docs-release`, which keeps a site per version on a branch; it needs the environment of `make docs`."""

import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-docs"
SITE = ("docs", "mkdocs.yml", "Makefile", "pyproject.toml", "async_flowrl", "checkpoint_engine", "separation")
"""What the site is made of."""


def call(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_sources(folder: Path) -> None:
    """A repository with one commit, so that this one gets no branch."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SITE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name, **({"ignore": ignored} if copy is shutil.copytree else {}))
    for words in (["init", "-q"], ["config", "user.email", "a@example.org"], ["config", "user.name", "a"]):
        call("git", *words, folder=folder)
    call("git", "add", "--all", folder=folder)
    call("git", "commit", "-q", "-m", "all", folder=folder)


@pytest.mark.slow
def test_each_version_has_a_site_and_the_newest_is_the_default(tmp_path: Path) -> None:
    if not (TOOLS / "bin" / "mike").exists():
        pytest.skip("make docs makes .venv-docs, with mike")
    copy_of_the_sources(tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for arguments in ([], ["DOCS_VERSION=99.0.0"]):
        call("make", "docs-release", f"DOCS_VENV={TOOLS}", *arguments, folder=tmp_path)
    known = json.loads(call("git", "show", "gh-pages:versions.json", folder=tmp_path))
    assert [(each["version"], each["aliases"]) for each in known] == [("99.0.0", ["latest"]), (version, [])]
    assert "latest" in call("git", "show", "gh-pages:index.html", folder=tmp_path)
    for each in (version, "99.0.0"):
        assert '"provider": "mike"' in call("git", "show", f"gh-pages:{each}/index.html", folder=tmp_path)
    assert call("git", "branch", "--show-current", folder=tmp_path).strip() in ("main", "master")
