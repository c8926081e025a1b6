"""Test of tensor parallelism over two processes: equal trajectories, and both processes end with their worker."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

import psutil

from tests.vllm_omni.rig import TOLERANCE


@pytest.mark.timeout(900)
def test_two_ranks_make_what_one_makes_and_die_with_their_worker() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm_omni.two_ranks"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), None)
        assert line is not None, "it ended before it found anything"
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    found = json.loads(line)
    assert found["same_base"], "the shards put together are not the trainer's base weights"
    assert found["gap_1"] < TOLERANCE and found["gap_4"] < TOLERANCE
    assert found["again_1"] and found["again_4"]
    assert len(children) >= 2
    _, left = psutil.wait_procs(children, timeout=60)
    for child in left:
        child.kill()
    assert not left
