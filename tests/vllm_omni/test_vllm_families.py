"""Tests of every family of the engine against diffusers; those of Qwen-Image are in test_vllm_engine.py."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

from async_flowrl.rollout.vllm_omni.engine_settings import FAMILIES
from tests.vllm_omni.compare_families import check

OTHERS = [family for family in FAMILIES if family != "qwen_image"]


@pytest.mark.timeout(900)
def test_every_family_makes_what_diffusers_makes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_omni.compare_families", *OTHERS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # vllm-omni puts its own name in front of what its process prints.
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"family"' in line]
    assert [found["family"] for found in lines] == OTHERS
    for found in lines:
        check(found)
