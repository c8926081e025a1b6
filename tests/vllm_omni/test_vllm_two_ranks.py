"""Test of tensor parallelism over two processes: equal trajectories, and both processes end with their worker."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

import psutil

from async_flowrl.rollout.vllm_omni.engine_settings import FAMILIES
from tests.vllm_omni.rig import TOLERANCE


def run(key: str, *arguments: str) -> tuple[dict[str, Any], list[psutil.Process]]:
    """The results of tests.vllm_omni.two_ranks, of which `key` is the first, and its processes after its own death."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm_omni.two_ranks", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        assert process.stdout is not None
        line = next((line[line.index("{") :] for line in process.stdout if f'{{"{key}"' in line), None)
        assert line is not None, "it ended before it found anything"
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    return json.loads(line), children


def all_end(processes: list[psutil.Process]) -> bool:
    _, left = psutil.wait_procs(processes, timeout=60)
    for process in left:
        process.kill()
    return not left


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "qwen_image" else [pytest.mark.slow]) for each in FAMILIES]
)
def test_two_ranks_make_what_diffusers_makes_and_die_with_their_worker(family: str) -> None:
    found, children = run("same_base", family)
    assert found["same_base"], "the shards put together are not the trainer's base weights"
    assert found["gap_1"] < TOLERANCE and found["gap_4"] < TOLERANCE
    assert found["again_1"] and found["again_4"]
    assert len(children) >= 2
    assert all_end(children)


@pytest.mark.timeout(900)
def test_the_death_of_one_rank_makes_the_worker_unusable() -> None:
    """A run then replaces the worker (tests/unit/test_faults.py)."""
    found, children = run("raised", "qwen_image", "killed")
    assert found["raised"] == "Unusable", found
    assert all_end(children)
