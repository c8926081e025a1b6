"""Tests of the Python environments of reward servers: made once, by one process, and again if left incomplete."""

import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from async_flowrl.rewards import server_environment
from async_flowrl.rewards.server_environment import environment_for, variables


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def requirements(folder: Path, text: str = "# nothing\n") -> Path:
    file = folder / "judge.txt"
    file.write_text(text)
    return file


def test_it_is_made_once_and_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(folder: Path, files: Sequence[Path]) -> None:
        time.sleep(0.2)
        folder.mkdir()
        made.append(folder)

    monkeypatch.setattr(server_environment, "_make", make)
    file = requirements(tmp_path)
    threads = [threading.Thread(target=environment_for, args=([file],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and made[0].is_relative_to(tmp_path / "cache" / "async_flowrl" / "environments")
    (made[0] / "complete").unlink()
    assert environment_for([file]) == made[0] and len(made) == 2
    assert environment_for([file, requirements(tmp_path, "# more\n")]) != made[0]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the requirements .*none.txt cannot be read on this node: No such file"):
        environment_for([tmp_path / "none.txt"])


@pytest.mark.slow
def test_a_real_one(tmp_path: Path) -> None:
    folder = environment_for([requirements(tmp_path)])
    code = "import async_flowrl, sys; print(async_flowrl.__version__, sys.prefix); import torch"
    ran = subprocess.run(["python", "-c", code], env=variables(folder), capture_output=True, text=True, check=False)
    assert ran.stdout.split()[1] == str(folder) and "No module named 'torch'" in ran.stderr
    with pytest.raises(ValueError, match=r"the environment of .*judge.txt cannot be made: .* No matching distribution"):
        environment_for([requirements(tmp_path, "no-such-package-of-anybody==1\n")])


SETUP = "from setuptools import setup\n{}setup(name={!r}, version='1', py_modules=[{!r}])\n"


@pytest.mark.slow
def test_packages_of_a_later_file_are_built_with_those_of_an_earlier_one(tmp_path: Path) -> None:
    """As mmcv-full is, whose setup.py imports torch."""
    for name, needed in (("tool", ""), ("built", "import tool\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").touch()
        (tmp_path / name / "setup.py").write_text(SETUP.format(needed, name, name))
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("setuptools<81\nwheel\n./tool\n")
    second.write_text("./built\n")
    folder = environment_for([first, second])
    subprocess.run(["python", "-c", "import built"], env=variables(folder), check=True)
    with pytest.raises(ValueError, match=r"the environment of .*second.txt cannot be made: .*No module named 'tool'"):
        environment_for([second])
