"""What a rehearsal remembers of a call is what torch makes of one like it, and it is counted as at the first time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from async_flowrl.memory.rehearsal import phases
from async_flowrl.memory.rehearsal.phases import Ledger, Phase

F = torch.nn.functional


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def squeezed() -> Any:
    tensor = some(3, 1, 5)
    return tensor.squeeze_(1), tensor * 2


def resized() -> Any:
    tensor = some(6)
    return tensor.resize_(20), tensor + 1


def trained() -> Any:
    network = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.GELU())
    network(some(5, 6)).sum().backward()
    return [weight.grad for weight in network.parameters()]


CALLS: dict[str, Callable[[], Any]] = {
    "in place": lambda: some(7, 4).add_(some(4)),
    "into a tensor": lambda: torch.mm(some(3, 4), some(4, 5), out=some(3, 5)),
    "other type": lambda: some(3, 4).to(torch.bfloat16),
    "scalar types": lambda: (some(3, dtype=torch.int64) * 1, some(3, dtype=torch.int64) * 1.0),
    "transposed": lambda: some(3, 4).t() * 2,
    "part of a storage": lambda: some(10, 4)[2:5] * 2,
    "repeated row": lambda: some(1, 4).expand(1000, 4) * 2,
    "repeated row of many": lambda: some(9, 4)[:1].expand(1000, 4) * 2,
    "one tensor twice": lambda: (lambda tensor: tensor * tensor)(some(64, 64)),
    "two tensors": lambda: some(64, 64) * some(64, 64),
    "concatenated": lambda: torch.cat([some(2, 3), some(4, 3)]),
    "channels last": lambda: F.conv2d(some(1, 3, 8, 8).contiguous(memory_format=torch.channels_last), some(5, 3, 3, 3)),
    "several outputs": lambda: torch.ops.aten.native_layer_norm(some(3, 4), [4], some(4), some(4), 1e-5),
    "sorted": lambda: some(9).sort(),
    "pieces": lambda: torch.ops.aten.split_copy(some(7, 2), 3),
    "drawn": lambda: torch.randn(3, 4, generator=torch.Generator().manual_seed(1)),
    "meta": lambda: torch.empty(3, 4, device="meta") + 1,
    "squeezed in place": squeezed,
    "resized": resized,
    "other offset": lambda: some(10)[2:5].as_strided_((3,), (1,), 5),
    "other storage": lambda: some(3).set_(some(3, 4)[0]),
    "trained": trained,
    "of a number": lambda: torch.tensor(5) + 1,
    "conjugated": lambda: some(3, dtype=torch.complex64).conj() * some(3, dtype=torch.complex64),
}


def layouts(made: Any) -> list[Any]:
    tensors = [each for each in tree_leaves(made) if isinstance(each, Tensor)]
    return [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.untyped_storage().nbytes()) for t in tensors]


def counted(call: Callable[[], Any]) -> tuple[list[Any], Phase]:
    ledger = Ledger()
    with FakeTensorMode(), ledger, ledger.phase("call") as phase:
        made = layouts(call())
    return made, phase


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "known_calls", {})


@pytest.mark.parametrize("name", CALLS)
def test_a_call_made_again_is_what_torch_makes_and_is_counted_alike(name: str) -> None:
    first = counted(CALLS[name])
    known = list(phases.known_calls)
    again = counted(CALLS[name])
    assert known == list(phases.known_calls) != []
    with FakeTensorMode():
        assert layouts(CALLS[name]()) == first[0] == again[0]
    assert first[1] == again[1]


def test_layouts_and_types_of_arguments_tell_calls_apart() -> None:
    of_rows, of_columns = counted(lambda: some(6, 4) * 2), counted(lambda: some(4, 6).t() * 2)
    assert of_rows[0] != of_columns[0]
    for one, other in (("two tensors", "one tensor twice"), ("repeated row", "repeated row of many")):
        assert counted(CALLS[one])[1].kernels != counted(CALLS[other])[1].kernels


def test_an_unsafe_view_is_no_kernel_and_makes_no_storage() -> None:
    product, seen = counted(lambda: some(6, 4) * 2), counted(lambda: torch.ops.aten._unsafe_view(some(6, 4) * 2, [24]))
    assert seen[1] == product[1]
