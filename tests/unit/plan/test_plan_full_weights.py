"""Tests of the memory plan of tune=full against the memory of a real rank and a real receiver."""

from copy import deepcopy

import pytest

from async_flowrl.cli.plan_memory import describe
from async_flowrl.memory.processes import plan_memory
from checkpoint_engine import Receiver
from checkpoint_engine.pinned_memory import pinned_bytes
from tests.support import trainer_rig as rig


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plan_is_what_a_rank_holds(dtype: str) -> None:
    config = rig.tiny_config(learning_rate=1e-3)
    config.tune, config.model.dtype = "full", dtype
    config.model.tiny.heads = 2
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    rig.update(worker, 0, [sampler.group(0, 0)])
    plan = plan_memory(config)
    parts, numel = plan.trainer.parts, worker.parameters.numel
    padded = worker.parameters.values.numel()
    assert plan.model.adapter_parameters == numel == plan.model.base_parameters
    held = {
        "masters and their gradient": worker.parameters.values.nbytes + worker.parameters.gradients.nbytes,
        "optimizer": sum(
            worker.optimizer._adam.state[worker.parameters.values][m].nbytes for m in ("exp_avg", "exp_avg_sq")
        ),
        "sum of the gradients": worker.update._sum._values.nbytes,
    }
    for name, found in held.items():
        assert parts[name] == pytest.approx(found, rel=1.1 * (padded / numel - 1) + 1e-3), name
    beside = sum(p.nbytes for p in worker.policy.transformer.parameters()) if dtype == "bfloat16" else 0
    assert parts["base weights"] - plan.model.buffer_bytes == beside
    size = sum(tensor.nbytes for tensor in worker.versions.retained.values())
    assert 4 * size / 2 <= parts["versions of the weights"] * padded / numel + 1, "two kept, two slots on a GPU"
    receiver = Receiver(sampler.engine.live_tensors(), capacity=config.live_versions)
    assert plan.model.version_bytes == pytest.approx(receiver.layout.nbytes, rel=0.05)
    assert plan.rollout.parts["versions of the weights"] == plan.model.version_bytes, "the live one"
    assert plan.ring == 4 * pinned_bytes(plan.model.version_bytes)
    config.rollout.versions_on = "device"
    on_device = plan_memory(config)
    assert (on_device.rollout.parts["versions of the weights"], on_device.ring) == (5 * plan.model.version_bytes, 0)
    held_back = sum(t.nbytes for part in worker._state.tensors().values() for t in part.values())
    assert plan.snapshot == pytest.approx(held_back, rel=0.02)
    assert plan.rollout.parts["base weights"] == plan.model.buffer_bytes
    assert f"full weights: {numel / 1e6:.1f} M trained" in describe(plan, config, 79)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_share_is_what_a_rank_of_four_holds(dtype: str) -> None:
    config = rig.tiny_config(num_workers=4, shard="none", ema_decay=0.9)
    config.tune, config.model.dtype = "full", dtype
    whole, of_one = plan_memory(config), deepcopy(config)
    config.trainer.shard = "full"
    plan = plan_memory(config)
    trained, frozen = plan.model.adapter_parameters, plan.model.base_bytes - plan.model.version_bytes
    assert frozen == 0
    for name in ("masters and their gradient", "optimizer"):
        assert plan.trainer.parts[name] == -(-whole.trainer.parts[name] // 4)
    slots = 4 * plan.model.version_bytes  # two for each stream, from which a rank that has all of a version sends it
    assert plan.trainer.parts["versions of the weights"] == -(
        -(whole.trainer.parts["versions of the weights"] - slots) // 4
    )
    assert plan.trainer.parts["sum of the gradients"] == 2 * trained, "int64, one of them"
    assert plan.trainer.parts["base weights"] - plan.model.buffer_bytes == trained, "float32, beside the masters"
    assert plan.trainer.resident < whole.trainer.resident / 3
    assert plan.trainer.parts["gathered blocks"] > plan.model.block_bytes
    assert plan.rollout == whole.rollout
    assert plan.host == 5 * plan.model.version_bytes, "on the first rank"
    assert plan.snapshot == -(-whole.snapshot // 4)
    assert "each trainer rank copies" in describe(plan, config, 79) and "the first" in describe(whole, of_one, 79)
    assert plan.sent_weights == whole.sent_weights == 3 * plan.model.version_bytes <= plan.payload
    config.algorithm.kl_coef = 0.05
    more = plan_memory(config).trainer.parts["versions of the weights"] - plan.trainer.parts["versions of the weights"]
    assert more == pytest.approx(plan.model.version_bytes / 4, abs=2), "a share of the reference"
