"""The wheel holds everything that a run needs: installed beside the dependencies, it trains from any folder."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("total_steps=3", "group_size=4", "trainer.micro_batch_size=4", "evaluate.images_per_prompt=2")


def call(*command: str | Path, folder: Path) -> str:
    """Without this checkout on the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_wheel_trains_from_another_folder(tmp_path: Path) -> None:
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("async_flowrl-*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(call(python, "-c", "import site; print(site.getsitepackages()[0])", folder=tmp_path).strip())
    # The dependencies as they are here; files named *.pth in that folder do not count, so not the checkout itself.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel, folder=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for package in ("async_flowrl", "separation", "checkpoint_engine"):
        where = call(python, "-c", f"import {package}; print({package}.__file__)", folder=elsewhere)
        assert Path(where.strip()).is_relative_to(site)
        assert (site / package / "py.typed").exists()
    call(python, "-m", "async_flowrl.main", "--config-name", "one_step_off", *SHORT, folder=elsewhere)
    summary = json.loads((elsewhere / "outputs" / "one_step_off" / "summary.json").read_text())
    assert summary["steps"] == 3
    (elsewhere / "mine.py").write_text(
        "def score(images, prompt):\n    return [float(image.mean()) for image in images]\n"
    )
    own = ("reward.terms.color.name=mine:score", "output_dir=own", "total_steps=1")
    call(tmp_path / "venv" / "bin" / "async-flowrl", "train", *SHORT[1:], *own, folder=elsewhere)
    assert json.loads((elsewhere / "own" / "summary.json").read_text())["steps"] == 1
