"""Tests of refused input of a program that is started as users start it."""

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
