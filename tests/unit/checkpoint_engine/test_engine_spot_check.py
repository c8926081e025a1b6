"""Tests of the comparison of a few elements of every live tensor with the bytes that were staged of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoint_engine import Layout, Publisher, WeightsMismatch
from checkpoint_engine.layout import sample

SHAPES = {"a": (7, 5), "b": (0, 3), "c": (3,), "d": (40, 9)}
Placed = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def together(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in one storage, with gaps, in another order than that of a layout."""
    flat, placed, end = torch.full((1000,), 77.0), {}, 3
    for name, tensor in reversed(given.items()):
        placed[name] = flat[end : end + tensor.numel()].view(tensor.shape).copy_(tensor)
        end += tensor.numel() + 5
    return placed


def transposed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.t().contiguous().t() for name, tensor in together(given).items()}


@pytest.mark.parametrize("placed", [together, transposed], ids=["together", "not contiguous"])
@pytest.mark.parametrize("sent", [None, torch.bfloat16], ids=["as they are", "cast"])
def test_a_sample_does_not_depend_on_where_tensors_lie(placed: Placed, sent: torch.dtype | None) -> None:
    given = tensors()
    layout = Layout.of(given, None if sent is None else dict.fromkeys(given, sent))
    alone = sample(layout, list(given.values()))
    assert alone.numel() == 16 + 0 + 3 + 16 and alone.dtype == (sent or torch.float32)
    lying = placed(given)
    assert torch.equal(sample(layout, [lying[name] for name in given]), alone)


@pytest.mark.parametrize("victim", ["a", "c", "d"])
def test_staged_bytes_that_are_not_those_of_tensors_together_are_named(victim: str) -> None:
    placed = together(tensors())
    publisher = Publisher(placed, retain=1)
    publisher.stage(0)
    buffer = publisher.staged[0].host
    assert buffer is not None
    buffer.views[sorted(SHAPES).index(victim)].add_(1.0)
    with pytest.raises(WeightsMismatch, match=f"version 0 .* {victim} begins"):
        publisher.seal(0)
    assert publisher.retained() == ()
    for version in (0, 1):
        publisher.stage(version, deadline=0.0)  # its place was freed
