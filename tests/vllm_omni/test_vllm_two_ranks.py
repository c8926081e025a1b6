"""Test of tensor parallelism over two processes: equal trajectories, and what the death of one of them leads to."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

import psutil

from async_flowrl.rollout.vllm_omni.engine_settings import FAMILIES
from tests.vllm_omni.compare_families import check


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "qwen_image" else [pytest.mark.slow]) for each in FAMILIES]
)
def test_two_ranks_make_what_diffusers_makes_and_the_death_of_one_makes_the_worker_unusable(family: str) -> None:
    """A run then replaces the worker (tests/unit/test_faults.py). The other rank ends with its worker."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm_omni.two_ranks", family],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        line = next((line[line.index("{") :] for line in process.stdout if '{"family"' in line), None)
        assert line is not None, "it ended before it found anything"
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=60)
    for child in left:
        child.kill()
    found = json.loads(line)
    check(found)
    assert found["raised"] == "Unusable"
    assert found["others"] and not left and not any(map(psutil.pid_exists, found["others"]))
