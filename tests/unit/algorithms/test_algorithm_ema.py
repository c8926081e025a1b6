"""Tests of moving averages of weights."""

import pytest
import torch

from async_flowrl.algorithms.ema import (
    OLD_POLICY_DECAYS,
    ema_decay,
    samples_from_average,
    update_average,
)


def test_ema_schedule() -> None:
    assert [ema_decay(step, 0.9) for step in (0, 1, 8, 1000)] == pytest.approx([0.1, 2 / 11, 0.5, 0.9])


def test_old_policy_schedules() -> None:
    assert [OLD_POLICY_DECAYS["copy"](step) for step in (0, 10, 1000)] == [0.0, 0.0, 0.0]
    assert [OLD_POLICY_DECAYS["half"](step) for step in (0, 10, 1000)] == [0.5, 0.5, 0.5]
    assert [OLD_POLICY_DECAYS["slow"](step) for step in (0, 100, 499, 1000)] == pytest.approx([0.0, 0.1, 0.499, 0.5])
    assert [OLD_POLICY_DECAYS["late"](step) for step in (0, 74, 75, 175, 1000)] == pytest.approx([0, 0, 0, 0.75, 0.999])


def test_only_nft_with_a_slow_old_policy_samples_from_an_average() -> None:
    assert samples_from_average("diffusion_nft", "slow") and samples_from_average("diffusion_nft", "late")
    assert not samples_from_average("diffusion_nft", "copy") and not samples_from_average("flow_grpo", "slow")


@pytest.mark.parametrize("decay", [0.0, 0.25, 1.0])
def test_update_average(decay: float) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 5)
    average = [old.clone()]
    update_average(average, [new], decay)
    assert torch.allclose(average[0], decay * old + (1 - decay) * new, atol=1e-7)
    if decay in (0.0, 1.0):
        assert torch.equal(average[0], old if decay == 1.0 else new)
