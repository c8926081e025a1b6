"""Tests of the FLOPs counter against torch's own (which sees no fused attention on CPUs); counting changes nothing."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from async_flowrl.config.schema import Config
from async_flowrl.observability.flops import FlopCounter, tensor_peak
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.fsdp import checkpoint_blocks
from async_flowrl.types import Sampling
from tests.support.tiny import randomise

SAMPLING = Sampling(64, 4, 1.0, 0.0, " ", "sde", 1.0)


@pytest.fixture(params=["float32", "bfloat16"])
def policy(request: pytest.FixtureRequest) -> PipelinePolicy:
    config = Config()
    loaded = load_policy(resolve_model(config.model), dtype=request.param, device="cpu", parts="all")
    add_lora(loaded.transformer, config.lora, loaded, 0)
    randomise(lora_parameters(loaded.transformer))
    return loaded


def encode(policy: PipelinePolicy) -> dict[str, Tensor]:
    """Apart from what is counted: below 2.13 torch's formula refuses attention whose keys have fewer heads."""
    return {name: torch.from_numpy(value) for name, value in policy.encode(["red red red"])[0].items()}


def forward(policy: PipelinePolicy, encoded: dict[str, Tensor]) -> Tensor:
    latents = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    return policy.velocity(latents, torch.full((3,), 0.5), encoded, None, SAMPLING)


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_what_torch_counts_and_counting_changes_no_bit(policy: PipelinePolicy, checkpointing: bool) -> None:
    """For torch's counter attention runs unfused, as two batched products that it knows."""
    if checkpointing:
        checkpoint_blocks(policy, "full")
    encoded = encode(policy)

    def train(around: Any) -> list[Tensor]:
        policy.transformer.zero_grad()
        with around:
            velocity = forward(policy, encoded)
            velocity.square().sum().backward()
        gradients = [parameter.grad for parameter in lora_parameters(policy.transformer).values()]
        return [velocity.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]

    plain, counted = train(nullcontext()), train(FlopCounter())
    assert len(plain) == len(counted) > 10
    assert all(torch.equal(one, other) for one, other in zip(plain, counted, strict=True))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs, FlopCounter() as ours:
        train(nullcontext())
    assert ours.total == torchs.get_total_flops() > 0


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_card_by_its_whole_name(name: str, teraflops: float | None) -> None:
    assert tensor_peak(name) == (None if teraflops is None else teraflops * 1e12)
