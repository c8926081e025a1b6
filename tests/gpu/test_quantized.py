"""The layers of a quantised base on a GPU: codes and made weights are those of a CPU, and passes repeat their bits."""

import pytest
import torch
from torch import nn

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.kernels import repeatable_kernels
from async_flowrl.policies.quantized_layer import FORMATS, QuantizedLinear
from async_flowrl.policies.registry import load_policy, resolve_model, weights_of
from checkpoint_engine import base_digest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", list(FORMATS))
def test_weights_are_made_as_on_a_cpu_and_passes_repeat(name: str) -> None:
    repeatable_kernels()
    plain = nn.Linear(256, 128, dtype=torch.bfloat16).requires_grad_(False)
    layer, form = QuantizedLinear(plain, name), FORMATS[name]
    layer.weight.data, layer.scale.data = form.encode(plain.weight.float(), torch.bfloat16)
    here = form.decode(layer.weight, layer.scale, layer.table)
    layer.cuda()
    assert torch.equal(form.decode(layer.weight, layer.scale, layer.table).cpu(), here)
    inputs = torch.randn(2, 16, 256).to("cuda", torch.bfloat16)
    passes = []
    for _ in range(2):
        x = inputs.clone().requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        passes += [(y.detach(), x.grad)]
    assert all(torch.equal(*pair) for pair in zip(*passes, strict=True))


def test_random_weights_are_quantised_where_they_are_drawn() -> None:
    model = resolve_model(ModelConfig(weights="random", quantize="int4"))
    assert {tensor.device.type for tensor in weights_of(model).values() if tensor.dtype == torch.int8} == {"cuda"}
    one, other = (
        load_policy(model, dtype=model.dtype, device="cuda", parts=parts).transformer
        for parts in ("all", "transformer")
    )
    assert base_digest(dict(one.named_parameters())) == base_digest(dict(other.named_parameters()))


def test_the_base_of_a_device_has_the_digest_of_the_host() -> None:
    """While it is loaded, the device holds it, one more tensor, and nothing of the original weights."""
    model = resolve_model(ModelConfig(quantize="nf4", tiny=TinyConfig(layers=4, heads=16)))
    here = load_policy(model, dtype=model.dtype, device="cpu", parts="transformer").transformer
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    there = load_policy(model, dtype=model.dtype, device="cuda", parts="transformer").transformer
    peak, tensors = torch.cuda.max_memory_allocated() - before, list(there.state_dict().values())
    largest, spare = max(tensor.nbytes for tensor in tensors), 2048 * (len(tensors) + len(list(there.modules())))
    assert peak < sum(tensor.nbytes for tensor in tensors) + largest + spare
    assert {parameter.device.type for parameter in there.parameters()} == {"cuda"}
    assert {buffer.device.type for buffer in there.buffers()} <= {"cuda"}
    assert base_digest(dict(there.named_parameters())) == base_digest(dict(here.named_parameters()))
