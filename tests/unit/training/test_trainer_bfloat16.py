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


def test_a_step_too_small_to_show_in_bfloat16_is_counted_and_warned_of_once(
    bfloat16: tuple[Config, rig.Sampler], caplog: pytest.LogCaptureFixture
) -> None:
    """Masters move, the versions that rollouts compute with hardly do."""
    config, sampler = rig.tiny_config(learning_rate=1e-9), bfloat16[1]
    config.model.dtype = "bfloat16"
    worker = rig.trainer(config)
    before = worker.parameters.fingerprint()
    worker.parameters.values.data.add_(1.0)  # B starts at zero, where any step shows
    worker.versions.retain(0)
    shares = [rig.update(worker, step, [sampler.group(0, 0)]).metrics["adapter/changed_share"] for step in range(2)]
    assert worker.parameters.fingerprint() != before and max(shares) < 0.01
    warnings = [record.getMessage() for record in caplog.records if "as rollouts compute with them" in record.message]
    assert len(warnings) == 1 and "(bfloat16)" in warnings[0] and "step 0" in warnings[0]


def test_what_a_step_changed_is_known_where_only_the_newest_version_is_kept(
    bfloat16: tuple[Config, rig.Sampler],
) -> None:
    config, sampler = rig.tiny_config(), bfloat16[1]
    config.model.dtype, config.max_staleness = "bfloat16", 0
    worker = rig.trainer(config)
    first, second = (rig.update(worker, step, [sampler.group(step, 0)]) for step in range(2))
    assert sorted(worker.versions.retained) == [2]
    assert all(0.1 < stats.metrics["adapter/changed_share"] <= 1.0 for stats in (first, second))


def test_float32_versions_say_nothing_of_rounding(handed: list[list[rig.Handed]]) -> None:
    assert "adapter/changed_share" not in rig.update(rig.trainer(rig.tiny_config()), 0, handed[0]).metrics
