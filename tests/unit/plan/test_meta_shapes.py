"""Tests of the remembered shapes of operators on the meta device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from async_flowrl.memory.footprint import Allocations
from async_flowrl.memory.meta_shapes import RememberedShapes

ROWS, WIDE = torch.empty(6, 4, device="meta"), torch.empty(8, 2, 6, device="meta").permute(2, 0, 1)
LINE, SQUARE = torch.empty(5, device="meta"), torch.empty(4, 4, device="meta")
IMAGES = torch.empty(2, 4, 8, 8, device="meta", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
CALLS: dict[str, Callable[[], Any]] = {
    "int": lambda: ROWS.to(torch.int32) + 1,
    "float": lambda: ROWS.to(torch.int32) + 1.0,
    "bool": lambda: ROWS.to(torch.int32) + True,
    "strides": lambda: WIDE * 2,
    "channels_last": lambda: nn.functional.conv2d(IMAGES, IMAGES[:1]),
    "broadcast": lambda: WIDE.sum(1) + ROWS[:, :2],
    "several": lambda: torch.native_layer_norm(ROWS, [4], None, None, 1e-5),
    "keyword": lambda: ROWS.sum(1, dtype=torch.float64),
    "no keyword": lambda: ROWS.sum(1),
    "name of a keyword": lambda: torch.bucketize(ROWS, LINE, out_int32=True),
    "other name": lambda: torch.bucketize(ROWS, LINE, right=True),
    "square": lambda: SQUARE * 2,
    "transposed square": lambda: SQUARE.t() * 2,
    "list": lambda: torch.cat([ROWS, ROWS[:2]]),
    "list of others": lambda: torch.cat([ROWS[:2], ROWS[:1]]),
}


class Seen(TorchDispatchMode):
    """Counts the operators that get this far, without those that only make a tensor of given strides."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.empty_strided.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def described(made: Any) -> list[tuple[Any, ...]]:
    tensors = [made] if isinstance(made, Tensor) else list(made)
    return [(t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()) for t in tensors]


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_the_computed_one(name: str) -> None:
    expected = described(CALLS[name]())
    with RememberedShapes():
        assert [described(CALLS[name]()) for _ in range(3)] == [expected] * 3


def test_equal_calls_compute_once_and_others_on_their_own() -> None:
    tensor = torch.empty(3, 7, 11, device="meta")
    with Seen() as seen, RememberedShapes():
        for _ in range(5):
            tensor.mul(2)
        assert seen.names == ["aten.mul.Tensor"]
        tensor.mul(2.0), tensor.transpose(0, 1).mul(2), tensor.double().mul(2)
    assert seen.names.count("aten.mul.Tensor") == 4


def test_views_and_writes_keep_their_storage() -> None:
    tensor = torch.empty(6, 4, device="meta")
    with RememberedShapes(), Allocations() as counted:
        for _ in range(2):
            assert tensor.view(4, 6).untyped_storage()._cdata == tensor.untyped_storage()._cdata
            assert tensor.add_(1) is tensor
            assert all(part.untyped_storage()._cdata == tensor.untyped_storage()._cdata for part in tensor.chunk(2))
    assert counted.peak == 0


def test_values_on_other_devices_are_computed() -> None:
    with RememberedShapes():
        assert [(torch.full((2,), value) * 2).tolist() for value in (1.0, 2.0)] == [[2.0, 2.0], [4.0, 4.0]]


def test_gradients_flow_and_are_counted_alike() -> None:
    layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)).to("meta")

    def peak() -> int:
        with Allocations() as counted:
            layer(torch.empty(4, 8, device="meta")).square().mean().backward()
        shapes = {name: p.grad.shape for name, p in layer.named_parameters() if p.grad is not None}
        assert shapes == {name: p.shape for name, p in layer.named_parameters()}
        layer.zero_grad()
        return counted.peak

    alone = peak()
    with RememberedShapes():
        assert [peak(), peak()] == [alone, alone]


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: nn.functional.linear(x, torch.empty(16, 8, device="meta")),
        lambda x: x.transpose(0, 1).reshape(-1, 8),
        lambda x: torch.matmul(x, torch.empty(2, 8, 4, device="meta")),
    ],
    ids=["linear without bias", "reshape of what is not contiguous", "batched matmul"],
)
def test_what_lies_in_the_memory_of_an_argument_is_counted_once_in_every_call(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """PyTorch has views whose schemas call their results new."""
    x = torch.empty(2, 6, 8, device="meta")

    def peak() -> int:
        with Allocations() as counted:
            compute(x)
        return counted.peak

    alone = peak()
    with RememberedShapes():
        assert [peak() for _ in range(3)] == [alone] * 3
