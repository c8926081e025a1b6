"""Tests of the flat vector of weights and of AdamW on it."""

import logging

import pytest
import torch
from torch import nn

from async_flowrl.config.schema import TrainerConfig
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.optimizer import Optimizer


def parameters() -> dict[str, nn.Parameter]:
    drawn = torch.Generator().manual_seed(3)
    return {name: nn.Parameter(torch.randn(shape, generator=drawn)) for name, shape in (("b", (5, 7)), ("a", (3,)))}


def flat(owners: dict[str, nn.Parameter]) -> FlatParameters:
    return FlatParameters(owners, torch.device("cpu"))


def moved(scale: float, eps: float) -> torch.Tensor:
    """The weights after three steps whose gradients have an RMS of about 5e-9 times `scale`."""
    vector = flat(parameters())
    optimizer = Optimizer(TrainerConfig(learning_rate=1e-2, eps=eps, weight_decay=0.0), vector)
    drawn = torch.Generator().manual_seed(1)
    start = vector.snapshot()
    for _ in range(3):
        for gradient in vector.named(vector.gradients).values():
            gradient.copy_(torch.randn(gradient.shape, generator=drawn) * 5e-9 * scale)
        optimizer.step(1e-2, optimizer.gradient_norms())
    return vector.snapshot() - start


def test_with_a_small_eps_the_scale_of_the_loss_does_not_matter() -> None:
    assert (moved(1.0, 1e-20) - moved(1e-5, 1e-20)).abs().max() < 1e-5
    assert moved(1.0, 1e-8).norm() < 0.7 * moved(1.0, 1e-20).norm()
    assert moved(1e-5, 1e-8).norm() < 1e-3 * moved(1.0, 1e-20).norm()


def test_an_eps_that_rules_the_step_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        moved(1.0, 1e-20)
        assert not caplog.records
        moved(1.0, 1e-8)
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "trainer.eps=1e-08" in caplog.text


def test_the_norm_is_clipped() -> None:
    vector = flat(parameters())
    optimizer = Optimizer(TrainerConfig(learning_rate=3e-4, max_grad_norm=0.5, weight_decay=0.0), vector)
    vector.gradients.copy_(vector.snapshot())
    norms = optimizer.gradient_norms()
    norm = norms[""]
    before = vector.gradients.clone()
    assert norm > 0.5
    optimizer.step(0.0, norms)
    assert torch.allclose(vector.gradients, before * 0.5 / norm)
