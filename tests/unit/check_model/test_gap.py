"""Tests of the difference of two arrays as check_model measures it."""

import pytest
import torch

from async_flowrl.cli.check_model import gap


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("stock_is_bad", [False, True])
def test_what_is_not_finite_never_agrees(bad: float, stock_is_bad: bool) -> None:
    ours, stock = torch.ones(3), torch.ones(3)
    (stock if stock_is_bad else ours)[1] = bad
    found = gap(ours, stock)
    assert found == (float("inf"), float("inf"))


def test_the_relative_gap_counts_from_the_largest_stock_value() -> None:
    found = gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert found == (2.0, 0.5)
