"""Tests of the Dockerfile without Docker: the copied files, and its steps in a fresh environment."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples" / "deploy" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
SYSTEM = "apt-get"
"""Steps for the system's packages are simulated: this machine gets none of them."""
WORDS = "total_steps=1 runtime.backend=local group_size=4 trainer.micro_batch_size=4 output_dir=runs/one"
TRAIN = f"async-flowrl train --config-name sync {WORDS}"


@dataclass(frozen=True)
class Step:
    """One instruction, its continued lines joined."""

    kind: str
    text: str


def steps() -> list[Step]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def arguments() -> dict[str, str]:
    """Defaults of the build arguments."""
    return dict(step.text.split("=", 1) for step in steps() if step.kind == "ARG" and "=" in step.text)


def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    let_through = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    copied = {word for step in steps() if step.kind == "COPY" for word in shlex.split(step.text)[:-1]}
    assert copied == let_through and all((ROOT / name).exists() for name in copied)
    assert {"async_flowrl", "separation", "checkpoint_engine", "configs"} <= copied


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_its_steps_make_an_environment_that_trains(tmp_path: Path) -> None:
    """Every step in order, on this machine's Python instead of the image's, in a folder instead of a container."""
    place, venv = tmp_path / "build", tmp_path / "venv"
    place.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {**arguments(), "VIRTUAL_ENV": str(venv), "ASYNC_FLOWRL_CACHE": str(tmp_path / "models")}
    environment["PATH"] = f"{venv}/bin:{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"
    carry_out(place, lambda text: execute(text, place, environment), simulate)
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    execute(TRAIN, elsewhere, environment)
    assert (elsewhere / "runs" / "one" / "summary.json").exists()
    command = [str(venv / "bin" / "python"), "-c", "import async_flowrl; print(async_flowrl.__file__)"]
    where = subprocess.run(command, check=True, capture_output=True, text=True, cwd=elsewhere, env=environment).stdout
    assert str(venv) in where, "the installed package, not the checkout"


def carry_out(place: Path, run: Callable[[str], None], system: Callable[[str], None]) -> None:
    """Copies what is copied into `place`, and hands each command to `run`, or to `system` if it is the system's."""
    for step in steps():
        if step.kind == "COPY":
            *names, target = shlex.split(step.text)
            for name in names:
                copy(ROOT / name, place / target / (name if target == "./" else ""))
        elif step.kind == "RUN":
            (system if step.text.startswith(SYSTEM) else run)(step.text)


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def simulate(text: str) -> None:
    """Whether the system's packages exist under these names, where apt-get can be asked."""
    if shutil.which(SYSTEM) is None or not list(Path("/var/lib/apt/lists").glob("*Packages*")):
        return
    (packages,) = re.findall(r"install --yes --no-install-recommends ([a-z0-9 .+-]+?) +&&", text)
    command = [SYSTEM, "install", "--simulate", "--no-install-recommends", *packages.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def execute(text: str, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(["sh", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
