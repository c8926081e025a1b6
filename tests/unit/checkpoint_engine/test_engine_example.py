"""Test of the package's example, which runs as it is printed, and ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "checkpoint_engine" / "publish_and_sample.py"


@pytest.mark.extended
def test_the_example_samples_from_what_was_published() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    seen = [
        (int(v), round(float(mean))) for v, mean in re.findall(r"version (\d+) \(\w+\): mean ([-\d.]+)", done.stdout)
    ]
    assert seen[-1] == (4, 4) and seen == sorted(seen)
    assert all(version == mean for version, mean in seen)
