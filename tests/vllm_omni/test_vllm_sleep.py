"""Test that vllm-omni's sleep mode needs CUDA. Where it fails, docs/rollout_engines.md says something that is old."""

import asyncio
import re
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vllm-omni is not installed; `make test-vllm-omni` sets an environment up")

import torch

from tests.vllm_omni.rig import Rig


@pytest.mark.skipif(torch.cuda.is_available(), reason="sleep mode is there with CUDA")
def test_a_rank_on_a_cpu_refuses_to_sleep(rig: Rig) -> None:
    client = rig.engine._client

    async def ask() -> Any:
        task = {"task_id": "test", "level": 1}
        return await client._omni.collective_rpc("handle_sleep_task", timeout=60, args=(task,))

    answer = asyncio.run_coroutine_threadsafe(ask(), client._loop).result(90)
    while isinstance(answer, list | tuple):
        (answer,) = answer
    assert answer.status == "ERROR"
    assert re.search("libcuda|cumem allocator is not available", answer.error_msg)
