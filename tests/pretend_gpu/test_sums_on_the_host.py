"""Test of a trainer rank on a pretended GPU whose sum and versions are in host memory: its bits, and what it frees."""

import gc
from pathlib import Path

import pytest
import torch

from tests.support import trainer_rig as rig


def test_sum_and_versions_in_host_memory_change_no_bit(tmp_path: Path) -> None:
    """With a measured and shortened step, a version of before, one that is sent, and one that is taken over again."""
    config = rig.tiny_config(micro_batch_size=2)
    config.algorithm.kl_probe_images, config.algorithm.max_kl_per_update = 2, 1e-9
    handed = [[rig.Sampler(config).group(step, index) for index in (0, 1)] for step in (0, 1)]
    made, held = [], []
    for where in ("device", "host"):
        config.trainer.sum_on = config.trainer.versions_on = where
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        worker = rig.trainer(config)
        stats = [rig.update(worker, step, groups) for step, groups in enumerate(handed)]
        worker.sender.stage(2)
        digest = worker.sender.policy.seal(2).digest
        worker.snapshots.wait()
        held.append(torch.cuda.memory_allocated() - before)
        assert worker.restore(worker.save(worker.snapshot(), str(tmp_path / where), {})) == 2
        tensors = [worker.update.sum.values, *worker.versions.retained.values()]
        assert {tensor.device.type for tensor in tensors} == {"cpu" if where == "host" else "cuda"}
        made.append((worker.parameters.fingerprint(), digest, [each.metrics for each in stats]))
        numbers = worker.parameters.numel
        del worker, tensors
        gc.collect()
    assert made[0] == made[1] and made[0][2][1]["trust_region/scale"] < 1
    # In float32: a sum of 8 bytes, two versions that are kept, and two places for those that are sent.
    assert held[0] - held[1] == pytest.approx((8 + 2 * 4 + 2 * 4) * numbers, rel=0.1)
