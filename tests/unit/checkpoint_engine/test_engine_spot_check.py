"""Tests of the comparison of a few elements of every live tensor with the bytes that were staged of them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoint_engine import Layout, Publisher, WeightsMismatch
from checkpoint_engine.spot_check import sample

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


def adjoining(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in one storage as in their layout, but for two that are in each other's place."""
    layout = Layout.of(given)
    placed = layout.views(layout.empty().fill_(77))
    placed["e"], placed["f"] = placed["f"], placed["e"]
    for name, tensor in given.items():
        placed[name].copy_(tensor)
    return placed


def dense(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors in one storage without gaps, where their layout has some."""
    names = sorted(given)
    parts = torch.cat([given[name].reshape(-1) for name in names]).split([given[name].numel() for name in names])
    return {name: part.view(given[name].shape) for name, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize("placed", [adjoining, together, dense, transposed, dict])
@pytest.mark.parametrize("sent", [None, torch.bfloat16], ids=["as they are", "cast"])
def test_what_is_staged_does_not_depend_on_where_tensors_lie(placed: Placed, sent: torch.dtype | None) -> None:
    """Tensors of 256 bytes adjoin each other in a layout; the others have padding behind them."""
    given = tensors() | {name: torch.full((64,), float(value)) for value, name in enumerate("efgh")}
    publisher = Publisher(placed(given), dtypes=None if sent is None else dict.fromkeys(given, sent))
    publisher.stage(0)
    header = publisher.seal(0)
    data = publisher.payload(0)[1]
    assert header.digests == publisher.layout.digests(publisher.layout.packed(given))
    assert not data[publisher.layout.entries[0].end : publisher.layout.entries[1].offset].any(), "padding stays zero"


@pytest.mark.parametrize("victim", ["a", "c", "d"])
def test_staged_bytes_that_are_not_those_of_tensors_together_are_named(victim: str) -> None:
    placed = together(tensors())
    publisher = Publisher(placed, retain=1)
    publisher.stage(0)
    buffer = publisher._staged[0].host
    assert buffer is not None
    buffer.views[sorted(SHAPES).index(victim)].add_(1.0)
    with pytest.raises(WeightsMismatch, match=f"version 0 .* {victim} begins"):
        publisher.seal(0)
    assert publisher.retained() == ()
    for version in (0, 1):
        publisher.stage(version, deadline=0.0)  # its place was freed
