"""The FLOPs counter against torch's own, which sees every matrix product that runs (but no fused attention on CPUs)."""

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from async_flowrl.config.schema import Config
from async_flowrl.observability.flops import Meter, counted, utilisation
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import add_lora
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.training.fsdp import checkpoint_blocks
from async_flowrl.types import Sampling

SAMPLING = Sampling(64, 4, 1.0, 0.0, " ", "sde", 1.0)
Conditioning = Mapping[str, Tensor]


@pytest.fixture
def policy() -> Policy:
    torch.set_num_threads(1)
    config = Config()
    found = load_policy(resolve_model(config.model), dtype="float32", device="cpu", parts="all")
    add_lora(found.transformer, config.lora, found, 0)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_what_torch_counts(policy: Policy, checkpointing: bool) -> None:
    """Attention runs unfused here, as two batched products that torch sees."""
    if checkpointing:
        checkpoint_blocks(policy)
    encoded = {name: torch.from_numpy(value) for name, value in policy.encode(["red red red"])[0].items()}
    latents, sigma = torch.randn(3, 16, 64), torch.full((3,), 0.5)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs, counted(policy.transformer) as ours:
        policy.velocity(latents, sigma, encoded, None, SAMPLING).square().sum().backward()
    assert ours.total == pytest.approx(torchs.get_total_flops(), rel=1e-3)


def test_rollout_is_what_torch_counts(policy: Policy) -> None:
    encoded = {name: torch.from_numpy(value) for name, value in policy.encode(["red red red"])[0].items()}
    latents, sigma = torch.randn(3, 16, 64), torch.full((3,), 0.5)
    sdpa, mode = sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False)
    with torch.no_grad(), sdpa, mode as torchs, counted(policy.transformer) as ours:
        policy.velocity(latents, sigma, encoded, None, SAMPLING)
    assert ours.total == pytest.approx(torchs.get_total_flops(), rel=1e-3)
    assert ours.backward == 0


def test_a_meter_counts_each_shape_once() -> None:
    layer = nn.Linear(8, 16, bias=False)
    meter = Meter(layer)
    for rows in (5, 5, 7):
        with meter.measure(rows):
            layer(torch.randn(rows, 8)).sum().backward()
        assert meter.flops(rows) == 2 * (2 * rows * 8 * 16)
    assert not layer._forward_hooks
    with pytest.raises(RuntimeError, match="it went wrong"), meter.measure(9):
        raise RuntimeError("it went wrong")
    with meter.measure(9):
        layer(torch.randn(9, 8))
    assert meter.flops(9) == 2 * 9 * 8 * 16


def test_frozen_weights_cost_no_gradient_of_theirs() -> None:
    frozen, trained = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
    frozen.requires_grad_(False)
    with counted(nn.Sequential(frozen, trained)) as flops:
        trained(frozen(torch.randn(5, 8))).sum().backward()
    assert flops.forward == 2 * 5 * (8 * 16 + 16 * 4)
    assert flops.backward == 2 * 5 * 16 * 4
    with counted(nn.Sequential(trained, frozen)) as flops:
        trained(frozen(torch.randn(5, 8, requires_grad=True))).sum().backward()
    assert flops.backward == 2 * 5 * (8 * 16 + 2 * 16 * 4)


def test_a_branch_whose_gradient_never_comes_back_costs_nothing() -> None:
    used, dead = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    both = nn.ModuleList([used, dead])
    with counted(both) as flops:
        x = torch.randn(2, 8)
        dead(x)
        used(x).sum().backward()
    assert flops.forward == 2 * (2 * 2 * 8 * 8)
    assert flops.backward == 2 * 2 * 8 * 8


def test_the_meta_device_counts_without_computing() -> None:
    layer = nn.Linear(1 << 15, 1 << 15, bias=False, device="meta")
    with counted(layer) as flops:
        layer(torch.empty(4, 1 << 15, device="meta"))
    assert flops.forward == 2 * 4 * 2**30


def test_everything_is_as_before_afterwards() -> None:
    attend, layer = nn.functional.scaled_dot_product_attention, nn.Linear(2, 2)
    with pytest.raises(KeyError), counted(layer):
        raise KeyError
    assert nn.functional.scaled_dot_product_attention is attend
    assert not layer._forward_hooks


def test_utilisation() -> None:
    assert utilisation(1e12, 2.0, 1e12) == 0.5
    assert utilisation(1e12, 2.0, None) is None


def test_threads_count_their_own_work_and_leave_torch_as_it_was() -> None:
    """Workers of the local backend share a process."""
    before, module = nn.functional.scaled_dot_product_attention, nn.Identity()
    both_in, first_out = threading.Barrier(2), threading.Event()
    found = {}

    def work(name: str, rows: int) -> None:
        with counted(module) as flops:
            both_in.wait(10)
            x = torch.ones(1, 1, rows, 8)
            nn.functional.scaled_dot_product_attention(x, x, x)
            if name == "second":
                first_out.wait(10)
        first_out.set()
        found[name] = flops.forward

    threads = [threading.Thread(target=work, args=each) for each in (("first", 4), ("second", 16))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"first": 2 * 2.0 * 4 * 4 * 8, "second": 2 * 2.0 * 16 * 16 * 8}
    assert nn.functional.scaled_dot_product_attention is before


def test_a_compiled_network_is_not_counted() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].compile(backend="eager")
    meter = Meter(module)
    with meter.measure("shape"):
        module(torch.ones(2, 4))
    assert meter.flops("shape") is None
