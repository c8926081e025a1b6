"""Test of the doctor on the devices of this machine: it describes each, and trains two steps on them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 540.0


def doctor(*words: str) -> str:
    command = [sys.executable, "-m", "async_flowrl", "doctor", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_describes_every_device_and_trains_two_steps_on_one(tmp_path: Path) -> None:
    said = doctor()
    assert all(f" device {index}: " in said for index in range(torch.cuda.device_count()))
    said = doctor("--run", "--config-name", "sync", "runtime.backend=local", f"output_dir={tmp_path / 'run'}")
    assert "ok       devices: " in said and "ok       two steps: " in said
