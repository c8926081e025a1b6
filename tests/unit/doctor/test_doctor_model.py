"""Tests of the doctor's random model, whose layers have the real shape, and of digests of its results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from async_flowrl.doctor import digests, setting
from async_flowrl.doctor.model import HEAD_DIM, PROMPTS, configuration
from async_flowrl.doctor.setting import Setting
from async_flowrl.memory.processes import plan_memory
from async_flowrl.policies.registry import load_policy
from async_flowrl.run.prepare import prepare

USUAL_TOKENS = 128


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(setting, "SMALL", replace(setting.SMALL, layers=1))
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "models"))
    return Setting(1, "NVIDIA H100", quick=True, work=str(tmp_path), logs=str(tmp_path))


def test_the_model_has_full_sized_heads_and_its_prompts_the_usual_length(small: Setting) -> None:
    prepared = prepare(configuration(small))
    assert prepared.config.model.dtype == "bfloat16"
    policy = load_policy(prepared.model, dtype="bfloat16", device="cpu", parts="all")
    block = policy.blocks[0]
    query = block.attn.to_q.weight
    assert query.shape == (small.sizes.heads * HEAD_DIM,) * 2 and query.dtype == torch.bfloat16
    for encoded in policy.encode(PROMPTS):
        assert abs(len(encoded["prompt_embeds"]) - USUAL_TOKENS) <= 6


def test_the_memory_plan_knows_the_model(small: Setting) -> None:
    plan = plan_memory(prepare(configuration(small)).config)
    assert plan.trainer.parts["base weights"] == plan.model.base_bytes > 0


def test_digests_repeat_on_a_cpu_in_both_dtypes(small: Setting) -> None:
    found = digests.all_digests(small, torch.device("cpu"), rounds=2)
    assert {name.rpartition(" in ")[2] for name in found} == {"bfloat16", "float32"}
    assert len(found) == 10
    for name, made in found.items():
        assert len(set(made)) == 1 and len(made[0]) == 32, name


def test_a_digest_sees_the_last_bit_and_a_refusal() -> None:
    def once(value: Tensor) -> str:
        return digests.digest(lambda: [value])

    one = torch.ones(8)
    assert once(one) != once(one.nextafter(torch.tensor(2.0)))

    def refuses() -> list[Tensor]:
        raise RuntimeError("scatter_add has no deterministic form\nmore")

    assert digests.digest(refuses) == "refused: scatter_add has no deterministic form"

    def overflows() -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        digests.digest(overflows)
