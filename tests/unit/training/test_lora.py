"""Tests of the adapter: attaching, naming and switching it; warm starts from files of diffusers and PEFT."""

from typing import Any

import pytest
import torch
from torch import Tensor

from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies.lora import (
    add_lora,
    compute_copies,
    lora_layers,
    lora_modules,
    lora_parameters,
    reference_mode,
)
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.support.tiny import RED, adapted_policy, randomise, sampling, tensors, tiny_policy


def output(policy: QwenImagePolicy) -> Tensor:
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    if policy.pipeline is None:
        positive = {"prompt_embeds": torch.randn(13, 32, generator=torch.Generator().manual_seed(1))}
    else:
        positive = tensors(policy.encode([RED.text])[0])
    return policy.velocity(x, torch.tensor([0.9, 0.3]), positive, None, sampling())


def test_a_new_adapter_changes_nothing_and_disturbs_no_random_state() -> None:
    policy = tiny_policy(parts="transformer")
    before = output(policy)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    add_lora(policy.transformer, LoraConfig(8, 16.0), policy, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(output(policy), before)


def test_exactly_the_adapter_is_trainable_and_every_tensor_of_it_gets_a_gradient() -> None:
    policy = adapted_policy()
    trainable = {name for name, p in policy.transformer.named_parameters() if p.requires_grad}
    assert len(trainable) == len(lora_parameters(policy.transformer))
    assert all(".lora_" in name for name in trainable)
    output(policy).square().mean().backward()
    for name, parameter in lora_parameters(policy.transformer).items():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_layers_compute_what_their_weights_and_scaling_say() -> None:
    policy = adapted_policy(config=LoraConfig(rank=4, alpha=12.0))
    modules = lora_modules(policy.transformer)
    assert list(modules) == sorted(modules) == list(lora_layers(modules))
    for name, layer in modules.items():
        a, b, scaling = compute_copies(layer)
        assert scaling == 3.0 and a.shape[0] == b.shape[1] == 4, name
        x = torch.randn(5, a.shape[1], generator=torch.Generator().manual_seed(0))
        base = layer.base_layer(x)
        assert torch.allclose(layer(x), base + scaling * (x @ a.T @ b.T), atol=1e-5), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_without_a_graph_gives_the_bits_of_one_with_a_graph(dtype: str) -> None:
    """Without a graph it adds to Wx in place, with one it does not; the trainer replays what a rollout recorded."""
    policy = adapted_policy(dtype=dtype)
    randomise(lora_parameters(policy.transformer))
    layer: Any = next(iter(lora_modules(policy.transformer).values()))
    wide = layer.get_base_layer().weight.shape[1]
    x = torch.randn(3, 5, wide, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    kept, with_graph = x.clone(), layer(x)
    with torch.no_grad():
        without = layer(x)
    assert with_graph.requires_grad and not without.requires_grad
    assert torch.equal(with_graph, without) and torch.equal(x, kept)
    assert not torch.equal(without, layer.get_base_layer()(x)), "the adapter has an effect"
    live = output(policy)
    with torch.no_grad():
        assert torch.equal(output(policy), live)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reference_mode_is_the_base_exactly_and_leaves_no_trace(compiled: bool) -> None:
    base, policy = tiny_policy(parts="transformer"), adapted_policy(parts="transformer")
    names = list(lora_parameters(policy.transformer))
    if compiled:
        for each in (base, policy):  # the compiler traces one block in half the time
            each.transformer.transformer_blocks = each.transformer.transformer_blocks[:1]
        names = list(lora_parameters(policy.transformer))
        policy.transformer = torch.compile(policy.transformer, backend="eager")  # type: ignore[assignment]
    assert list(lora_parameters(policy.transformer)) == names
    live, expected = output(policy), output(base)
    with reference_mode(policy.transformer):
        assert all(p.requires_grad for p in lora_parameters(policy.transformer).values())
        assert torch.equal(output(policy), expected)
        with reference_mode(policy.transformer):
            pass
        assert torch.equal(output(policy), expected)
    assert not torch.equal(live, expected)
    assert torch.equal(output(policy), live)
    with pytest.raises(KeyError), reference_mode(policy.transformer):
        raise KeyError
    assert torch.equal(output(policy), live)
