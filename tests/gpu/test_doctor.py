"""Test of the doctor's quick pass, from its first line to its report, on the devices of this machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_flowrl.doctor.checks import CHECKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMIT = 540.0


def test_the_quick_pass_finds_nothing_broken(tmp_path: Path) -> None:
    # Twice the time of each check: its limits are for GPUs, and the devices may be pretended ones on a busy machine.
    command = [
        sys.executable,
        "-m",
        "async_flowrl.doctor",
        "--gpu",
        "--quick",
        "--minutes",
        "30",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert list(report["checks"]) == list(CHECKS)
    assert report["pretended"] == ("pretended" in torch.cuda.get_device_name())
    findings = {each["name"]: each for check in report["checks"].values() for each in check["findings"]}
    assert findings["one_step_off twice"]["status"] == "ok"
    assert findings["determinism of network in bfloat16"]["status"] == "ok"
    assert ("Pretended device" in (tmp_path / "doctor.md").read_text()) == report["pretended"]
