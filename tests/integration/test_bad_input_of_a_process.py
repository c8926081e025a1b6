"""Tests of refused input of a program that is started as users start it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.runs import LIMIT, ROOT


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "async_flowrl.main", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )


def test_as_a_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = command("mode=one_stp_off", f"output_dir={out}")
    assert done.returncode == 2
    assert done.stderr.startswith("async_flowrl: mode must be one of")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not out.exists()


def test_another_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """PyPI's checkpoint-engine installs the same import name."""
    (tmp_path / "checkpoint_engine").mkdir()
    (tmp_path / "checkpoint_engine" / "__init__.py").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "async_flowrl.main"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert f"checkpoint_engine is imported from {tmp_path}" in ended.stderr
    assert "Traceback" not in ended.stderr
