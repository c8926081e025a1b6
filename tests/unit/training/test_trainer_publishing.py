"""Tests of published versions: the trained weights, bound to the same modules."""

import pytest
import torch

from async_flowrl.policies.lora import keep_compute_copies, lora_parameters
from checkpoint_engine import PROOF_VERSION, check_binding
from tests.support import trainer_rig as rig


@pytest.mark.extended
def test_a_bfloat16_base_is_sent_versions_in_bfloat16_that_are_the_masters_rounded() -> None:
    """Half the bytes; with them a layer has the same output bit for bit (tests/unit/policies/test_lora_layer.py)."""
    config = rig.tiny_config(learning_rate=1e-2)
    config.model.dtype = "bfloat16"
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    keep_compute_copies(sampler.policy.transformer)
    site = rig.Site(config, sampler)
    before, mine = worker.parameters.fingerprint(), worker.sender.proof()
    site.receive(worker, PROOF_VERSION)
    check_binding(mine, site.sampler.engine.probe())
    assert worker.parameters.fingerprint() == before, "the proof trains nothing"
    for step in range(2):
        rig.update(worker, step, [sampler.group(0, 0)])
        worker.sender.stage(step + 1)
        site.receive(worker, step + 1)
    held, masters = lora_parameters(sampler.policy.transformer), rig.weights(worker)
    assert sum(t.nbytes for t in held.values()) * 2 == sum(t.nbytes for t in masters.values())
    for name, tensor in held.items():
        assert torch.equal(tensor, torch.from_numpy(masters[name]).to(torch.bfloat16)), name


def test_the_average_has_its_own_stream() -> None:
    config = rig.tiny_config(ema_decay=0.9, ema_every=1)
    worker = rig.trainer(config)
    rig.update(worker, 0, [rig.Sampler(config).group(0, 0)])
    worker.sender.stage(1)
    worker.sender.stage(1, "ema")
    one, other = worker.sender.policy.seal(1), worker.sender.ema.seal(1)
    assert one.stream == "policy" and other.stream == "ema" and one.digests != other.digests
    with pytest.raises(ValueError, match="is not here to be published"):
        worker.sender.stage(0, "ema")
    with pytest.raises(ValueError, match="no stream 'sampling'"):
        worker.sender.stage(1, "sampling")
