"""Tests of the LoRA formula against float64, against PEFT's layer, and between rollout and trainer."""

from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

from async_flowrl.policies.lora import (
    compute_copies,
    compute_dtypes,
    keep_compute_copies,
    lora_layers,
    lora_modules,
    lora_parameters,
)
from async_flowrl.policies.lora_layer import lora_linear
from tests.support.tiny import adapted_policy

SCALING = 3.0


def adapted(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Any:
    """A layer [24 → 40] with bias and a random adapter of rank 8."""
    generator = torch.Generator().manual_seed(seed)
    base = nn.Linear(24, 40, dtype=dtype)
    config = peft.LoraConfig(r=8, lora_alpha=8 * SCALING, target_modules=["0"])
    config._register_custom_module({nn.Linear: lora_linear()})
    network = peft.get_peft_model(cast("Any", nn.Sequential(base)), config)
    (layer,) = lora_modules(network).values()
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    layer.base_layer.requires_grad_(False)
    return layer


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """x [3, 5, 24] that wants a gradient, and the gradient [3, 5, 40] of the output."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 24, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(3, 5, 40, generator=generator).to(dtype)


def referee(layer: Any, x: Tensor, g: Tensor) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Output and gradients by hand, in NumPy's float64 and with explicit sums: no matrix product of torch's."""
    a, b, scaling = compute_copies(layer)
    assert scaling == SCALING
    a, b, w, bias = (t.detach().double().numpy() for t in (a, b, layer.base_layer.weight, layer.base_layer.bias))
    rows, out = (t.detach().double().flatten(0, -2).numpy() for t in (x, g))
    hidden = np.einsum("ni,ri->nr", rows, a)
    back = scaling * np.einsum("no,or->nr", out, b)
    return {
        "y": np.einsum("ni,oi->no", rows, w) + bias + scaling * np.einsum("nr,or->no", hidden, b),
        "x": np.einsum("no,oi->ni", out, w) + np.einsum("nr,ri->ni", back, a),
        "a": np.einsum("nr,ni->ri", back, rows),
        "b": scaling * np.einsum("no,nr->or", out, hidden),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_are_those_of_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    layer, (x, g) = adapted(dtype), inputs(dtype)
    y = layer(x)
    y.backward(g)
    assert y.dtype == dtype and y.shape == (3, 5, 40)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == b.dtype == a.grad.dtype == b.grad.dtype == torch.float32
    expected = referee(layer, x, g)
    assert x.grad is not None
    for name, found in {"y": y, "x": x.grad, "a": a.grad, "b": b.grad}.items():
        value = found.detach().double().numpy().reshape(expected[name].shape)
        assert np.abs(value - expected[name]).max() < tolerance * np.abs(expected[name]).max(), name


def test_a_rollout_with_compute_copies_gives_the_bits_of_a_trainer_with_float32_masters() -> None:
    trainer, rollout = adapted(torch.bfloat16), adapted(torch.bfloat16)
    keep_compute_copies(rollout)
    held = list(lora_parameters(rollout).values())
    assert [parameter.dtype for parameter in held] == [torch.bfloat16] * 2
    x, _ = inputs(torch.bfloat16)
    assert torch.equal(trainer(x), rollout(x))


def test_every_adapted_layer_of_a_network_computes_so() -> None:
    policy = adapted_policy(dtype="bfloat16")
    modules = lora_modules(policy.transformer)
    assert list(modules) == sorted(modules) == list(lora_layers(modules))
    assert {type(layer) for layer in modules.values()} == {lora_linear()}
    dtypes = compute_dtypes(policy.transformer)
    assert dtypes.keys() == lora_parameters(policy.transformer).keys()
    assert set(dtypes.values()) == {torch.bfloat16}
