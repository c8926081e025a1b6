"""Test of wheel and sdist: each is installed in a clean environment and trains from any folder."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from async_flowrl.__main__ import VERBS

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_flowrl", "separation", "checkpoint_engine")
SHORT = ("total_steps=3", "group_size=4", "trainer.micro_batch_size=4", "evaluate.images_per_prompt=2")


def call(*command: str | Path, folder: Path) -> str:
    """Without this checkout on the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def distribution(kind: str, folder: Path) -> Path:
    """What is published, built from this checkout."""
    call(sys.executable, "-m", "build", f"--{kind}", "--outdir", folder, ROOT, folder=folder)
    (built,) = folder.glob("async_flowrl-*.whl" if kind == "wheel" else "async_flowrl-*.tar.gz")
    return built


def installed(built: Path, folder: Path) -> tuple[Path, Path]:
    """A clean environment with it: its `bin`, and the folder with its packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = Path(call(python, "-c", "import site; print(site.getsitepackages()[0])", folder=folder).strip())
    # The dependencies as they are here; files named *.pth in that folder do not count, so not the checkout itself.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", built, folder=folder)
    return folder / "bin", site


def files_of(package: Path) -> set[str]:
    """Modules and data alike, but what Python makes of them."""
    paths = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(package).as_posix() for path in paths}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_installed_trains_from_another_folder(kind: str, tmp_path: Path) -> None:
    programs, site = installed(distribution(kind, tmp_path), tmp_path / "venv")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for package in PACKAGES:
        where = call(programs / "python", "-c", f"import {package}; print({package}.__file__)", folder=elsewhere)
        assert Path(where.strip()).is_relative_to(site)
        assert files_of(ROOT / package) - files_of(site / package) == set()
    assert files_of(ROOT / "configs") == files_of(site / "async_flowrl" / "configs")
    call(programs / "async-flowrl", "train", "--config-name", "one_step_off", *SHORT, folder=elsewhere)
    run = elsewhere / "outputs" / "one_step_off"
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert (run / "report.html").stat().st_size > 50_000
    call(programs / "async-flowrl", "verify", run, folder=elsewhere)
    (elsewhere / "mine.py").write_text(
        "def score(images, prompt):\n    return [float(image.mean()) for image in images]\n"
    )
    own = ("reward.terms.color.name=mine:score", "output_dir=own", "total_steps=1")
    call(programs / "async-flowrl", "train", *SHORT[1:], *own, folder=elsewhere)
    assert json.loads((elsewhere / "own" / "summary.json").read_text())["steps"] == 1
    for verb in VERBS:
        assert "usage: " in call(programs / "async-flowrl", verb, "--help", folder=elsewhere)
