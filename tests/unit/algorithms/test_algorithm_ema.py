"""Tests of moving averages of weights."""

import pytest
import torch

from async_flowrl.algorithms.ema import DECAYS, ema_decay, kept_vectors, samples_from_average, update_average
from async_flowrl.config.schema import AlgorithmConfig


def test_ema_schedule() -> None:
    assert [ema_decay(step, 0.9) for step in (0, 1, 8, 1000)] == pytest.approx([0.1, 2 / 11, 0.5, 0.9])


def test_old_policy_schedules() -> None:
    assert [DECAYS["copy"](step) for step in (0, 10, 1000)] == [0.0, 0.0, 0.0]
    assert [DECAYS["half"](step) for step in (0, 10, 1000)] == [0.5, 0.5, 0.5]
    assert [DECAYS["slow"](step) for step in (0, 100, 499, 1000)] == pytest.approx([0.0, 0.1, 0.499, 0.5])
    assert [DECAYS["late"](step) for step in (0, 74, 75, 175, 1000)] == pytest.approx([0, 0, 0, 0.75, 0.999])
    assert [DECAYS["quick"](step) for step in (0, 100, 1000)] == pytest.approx([0.0, 0.1, 0.3])
    assert [DECAYS["rising"](step) for step in (0, 100, 1000)] == pytest.approx([0.25, 0.75, 0.999])


@pytest.mark.parametrize(
    ("name", "decay", "average", "vectors"),
    [
        ("diffusion_nft", "slow", None, 1),
        ("crd", "late", "rising", 2),
        ("diffusion_nft", "copy", None, 0),
        ("awm", "copy", "quick", 1),
    ],
)
def test_what_is_averaged_and_what_is_sampled_from(name: str, decay: str, average: str | None, vectors: int) -> None:
    config = AlgorithmConfig(name=name, old_policy_decay=decay, average_decay=average)
    assert samples_from_average(config) == (decay != "copy") and kept_vectors(config) == vectors


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_update_average(decay: float) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 5)
    average = [old.clone()]
    update_average(average, [new], decay)
    assert torch.allclose(average[0], decay * old + (1 - decay) * new, atol=1e-7)
    if decay in (0.0, 1.0):
        assert torch.equal(average[0], old if decay == 1.0 else new)
