"""Tests of the KL of an optimizer step against another calculation of it, and of the bound on it."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.tickets.request import sampling
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.training.trust_region import shorten
from tests.support import trainer_rig as rig


def config(limit: float | None = None, images: int = 4, **trainer: Any) -> Config:
    result = rig.tiny_config(**trainer)
    result.algorithm.max_kl_per_update, result.algorithm.kl_probe_images = limit, images
    return result


def trained(given: Config, batches: list[list[rig.Handed]]) -> tuple[TrainerWorker, list[dict[str, float]]]:
    worker = rig.trainer(given)
    return worker, [dict(rig.update(worker, step, batch).metrics) for step, batch in enumerate(batches)]


def referee(given: Config, before: dict[str, Any], after: dict[str, Any], batch: list[rig.Handed]) -> dict[int, float]:
    """Nats per image of the first group by step: a sampler with both weights, the mean of the SDE step written anew."""
    velocities, sampler = [], rig.Sampler(given)
    for tensors in (before, after):
        sampler.load(tensors)
        velocities.append(_velocities(sampler, batch[0][1][0]))
    result: dict[int, float] = {}
    a = given.algorithm.noise_level
    trajectory = batch[0][1][0]
    sigmas = [float(sigma) for sigma in trajectory.sigmas]
    for step, one, other in zip(trajectory.train_steps, *velocities, strict=True):
        s, h = sigmas[step], sigmas[step] - sigmas[step + 1]
        g = a * math.sqrt(s / (1 - (s if step else sigmas[1])))
        # dx = -(v + g² (x + (1 - s) v) / 2 s) h + g sqrt(h) noise, so a change of v moves the mean by this factor.
        factor = h * (1 + g**2 * (1 - s) / (2 * s))
        square = ((one - other).double() * factor).square().flatten(1).sum(dim=1)
        result[step] = float((square / (2 * g**2 * h)).mean())
    return result


def _velocities(sampler: rig.Sampler, trajectory: Any) -> list[Tensor]:
    conditioning = {name: torch.tensor(value) for name, value in trajectory.conditioning.items()}
    how = sampling(sampler.config)
    with torch.no_grad():
        return [
            sampler.policy.velocity(
                torch.tensor(trajectory.latents[:, trajectory.points.index(step)]),
                torch.full((len(trajectory.latents),), float(trajectory.sigmas[step])),
                conditioning,
                None,
                how,
            )
            for step in trajectory.train_steps
        ]


@pytest.mark.extended
def test_measured_kl_is_that_of_another_calculation(handed: list[list[rig.Handed]]) -> None:
    given = config()
    worker = rig.trainer(given)
    before = rig.weights(worker)
    metrics = rig.update(worker, 0, handed[0]).metrics
    expected = referee(given, before, rig.weights(worker), handed[0])
    assert metrics["kl_per_update"] == pytest.approx(sum(expected.values()), rel=1e-3)
    for step, nats in expected.items():
        assert metrics[f"kl_per_update/{step}"] == pytest.approx(nats, rel=1e-3)


@pytest.mark.extended
def test_without_a_limit_every_tenth_update_is_measured(handed: list[list[rig.Handed]]) -> None:
    _, lines = trained(config(), [handed[0]] * 11)
    assert [index for index, line in enumerate(lines) if "kl_per_update" in line] == [0, 10]


def test_a_long_step_is_scaled_to_the_limit(handed: list[list[rig.Handed]]) -> None:
    first, (unbounded,) = trained(config(), handed[:1])
    limit = unbounded["kl_per_update"] / 50
    given = config(limit)
    worker = rig.trainer(given)
    start = rig.weights(worker)
    metrics = rig.update(worker, 0, handed[0]).metrics
    assert metrics["trust_region/raw_kl"] == unbounded["kl_per_update"]
    assert 0.8 * limit < metrics["kl_per_update"] <= limit
    assert metrics["trust_region/scale"] == pytest.approx(math.sqrt(1 / 50), rel=0.3)
    assert sum(referee(given, start, rig.weights(worker), handed[0]).values()) <= 1.01 * limit
    for name, value in rig.weights(worker).items():
        np.testing.assert_allclose(
            value - start[name], metrics["trust_region/scale"] * (rig.weights(first)[name] - start[name]), atol=1e-6
        )


def test_measuring_changes_no_bit_and_nor_does_a_limit_that_is_kept(handed: list[list[rig.Handed]]) -> None:
    configs = (config(images=0), config(), config(1e9))
    digests = {trained(given, handed)[0].parameters.fingerprint() for given in configs}
    assert len(digests) == 1


def test_a_step_that_cannot_be_measured_is_taken_back() -> None:
    before, values = torch.ones(3), torch.full((3,), 2.0)
    found, scale = shorten(values, before, {0: math.nan}, lambda: {0: math.nan if values[0] != 1 else 0.0}, 1.0)
    assert torch.equal(values, before) and scale == 0.0 and found == {0: 0.0}
