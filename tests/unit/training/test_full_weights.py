"""Tests of tune=full on one rank: trained tensors, precision, sent versions, and the proof weights."""

import functools
import re

import numpy as np
import pytest
import torch
from torch import nn

from async_flowrl.config.schema import Config
from async_flowrl.training.flat import FlatParameters
from checkpoint_engine import PROOF_VERSION, check_binding, weights_digest
from tests.support import trainer_rig as rig

BF16 = torch.bfloat16


def full_config(dtype: str = "float32") -> Config:
    config = rig.tiny_config(learning_rate=1e-3)
    config.tune, config.model.dtype = "full", dtype
    config.model.tiny.heads, config.model.tiny.layers = 2, 2
    return config


@pytest.mark.extended
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_changes_every_parameter_and_its_version_is_the_whole_network(dtype: str) -> None:
    config = full_config(dtype)
    worker, site = rig.trainer(config), rig.Site(config)
    before = rig.weights(worker)
    stats = rig.update(worker, 0, [site.sampler.group(0, 0)])
    names = dict(worker.policy.transformer.named_parameters())
    after = rig.weights(worker)
    assert after.keys() == names.keys() and all(array.dtype == np.float32 for array in after.values())
    same = {name for name in names if np.array_equal(before[name], after[name])}
    dead = {name for name in names if re.fullmatch(str(worker.policy.lora_exclude), name.rpartition(".")[0])}
    dead.add("transformer_blocks.1.attn.norm_added_q.weight")  # of the last block's text stream, as those are
    assert same == dead, "what no output depends on, and nothing else"
    # The sampler of these tests is on the CPU: beside a trainer on a GPU its bfloat16 kernels round otherwise.
    bound = 1e-4 if dtype == "bfloat16" and torch.cuda.is_available() else 1e-6
    assert stats.metrics["behaviour_gap"] < bound, "rollout and trainer compute the same"
    worker.sender.stage(1)
    site.receive(worker, 1)
    network = site.tensors()
    assert worker.sender.policy.payload(1)[0].nbytes >= sum(t.nbytes for t in network.values())
    for name, tensor in network.items():
        assert torch.equal(tensor, torch.from_numpy(after[name]).to(getattr(torch, dtype))), name
    if dtype == "bfloat16":
        assert worker.policy.transformer.get_parameter(name).dtype == BF16


def test_the_proof_is_found_under_the_networks_own_names() -> None:
    """Version 0 would not tell: both ends have loaded it, and many of its tensors are alike."""
    config = full_config()
    worker, site = rig.trainer(config), rig.Site(config)
    start = {name: tensor.clone() for name, tensor in site.tensors().items()}
    expected = worker.sender.proof()
    site.receive(worker, PROOF_VERSION)
    check_binding(expected, site.sampler.engine.probe())
    assert expected.keys() == start.keys()
    assert not any(torch.equal(tensor, start[name]) for name, tensor in site.tensors().items())
    assert rig.digest(worker) == weights_digest(start), "the trainer has its own weights back"


def test_gradients_of_bfloat16_parameters_are_added_in_float32() -> None:
    layer = nn.Linear(8, 4, bias=False).to(BF16)
    start = layer.weight.detach().clone()
    flat = FlatParameters({"weight": layer.weight}, torch.device("cpu"))
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(BF16) for seed in range(40)]
    for batch in batches:
        layer(batch).sum().backward()
    each = [batch.float().sum(0).to(BF16).float().expand(4, 8) for batch in batches]
    expected = functools.reduce(torch.add, each)
    assert torch.equal(flat.named(flat.gradients)["weight"], expected)
    assert not torch.equal(expected, functools.reduce(torch.add, [one.to(BF16) for one in each]).float())
    assert layer.weight.grad is None, "only the float32 sum is kept"
    flat.values.data.add_(1e-4)  # too small to show in bfloat16 where a weight is large
    flat.changed()
    assert torch.equal(layer.weight.data, (start.float() + 1e-4).to(BF16))
    masters = flat.snapshot()
    with flat.swapped(torch.zeros_like(masters, dtype=BF16)):
        assert not layer.weight.any() and torch.equal(flat.values.data, masters)
    assert torch.equal(layer.weight.data, (start.float() + 1e-4).to(BF16))


@pytest.mark.extended
def test_frozen_parameters_stay_and_are_not_sent() -> None:
    config = full_config()
    config.full.freeze = ["*norm*", "transformer_blocks.0.*"]
    worker, sampler = rig.trainer(config), rig.Sampler(config)
    start = {name: parameter.detach().clone() for name, parameter in worker.policy.transformer.named_parameters()}
    rig.update(worker, 0, [sampler.group(0, 0)])
    names = rig.weights(worker).keys()
    frozen = {name for name in start if "norm" in name or name.startswith("transformer_blocks.0.")}
    assert names == start.keys() - frozen and frozen
    for name in frozen:
        assert torch.equal(start[name], worker.policy.transformer.get_parameter(name))
    assert {entry.name for entry in worker.sender.policy.layout.entries} == names
