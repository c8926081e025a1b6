"""Tests of training on a bfloat16 base: float32 adapters, and steps too small to show in bfloat16."""

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import Config
from tests.support import trainer_rig as rig


@pytest.fixture(scope="module")
def bfloat16() -> tuple[Config, rig.Sampler]:
    """A configuration with a bfloat16 base, and its sampler."""
    config = rig.tiny_config()
    config.model.dtype = "bfloat16"
    return config, rig.Sampler(config)


def test_a_bfloat16_base_keeps_float32_adapters_and_closes_the_loop(bfloat16: tuple[Config, rig.Sampler]) -> None:
    config, sampler = bfloat16
    worker = rig.trainer(config)
    group = sampler.group(0, 0)
    first = rig.update(worker, 0, [group])
    # The sampler is on the CPU; a trainer on a GPU has other attention kernels.
    gap = 1e-6 if worker.device.type == "cpu" else 1e-4
    assert first.metrics["ratio_deviation_squared"] == 0.0 and first.metrics["behaviour_gap"] < gap
    assert {tensor.dtype for tensor in rig.weights(worker).values()} == {np.dtype(np.float32)}
    assert {p.dtype for p in worker.policy.transformer.parameters()} == {torch.bfloat16, torch.float32}
    assert 0.1 < first.metrics["adapter/changed_share"] <= 1.0
