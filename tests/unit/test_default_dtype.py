"""Tests of a model loaded in one thread, which sets torch's default dtype for all: other threads' results stay equal.

With rollout.text_encoder=cached text encoders are loaded in mid-run, beside the other tickets of a batch, and with
runtime.backend=local beside every other worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support import families
from tests.support import trainer_rig as rig
from tests.support.tiny import request


@contextmanager
def somebody_loads() -> Iterator[None]:
    """What transformers and diffusers set while they build a bfloat16 model."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", families.NAMES)
def test_tickets_are_generated_alike(family: str) -> None:
    engine = DiffusersEngine(families.policy_of(family))
    asked = request(2, how=families.how(family, cfg=1.0 if family == "flux" else 3.0))
    alone = engine.generate(asked)
    with somebody_loads():
        beside = engine.generate(asked)
    assert np.array_equal(beside.images, alone.images)
    assert alone.trajectory is not None and beside.trajectory is not None
    assert np.array_equal(beside.trajectory.latents, alone.trajectory.latents)
    assert np.array_equal(beside.trajectory.log_probs, alone.trajectory.log_probs)


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_a_step_is_trained_alike(algorithm: str) -> None:
    """Flow-GRPO with a window of one step: how far the others move is measured on noise that the trainer draws."""
    config = rig.tiny_config()
    config.algorithm.name = algorithm
    if algorithm == "flow_grpo":
        config.algorithm.kl_probe_images, config.algorithm.max_kl_per_update = 2, 10.0
        config.algorithm.window, config.algorithm.sde_window_size, config.algorithm.window_list = "list", 1, [0]
    sampler = rig.Sampler(config)
    handed = [sampler.group(0, group) for group in (0, 1)]
    alone, beside = rig.trainer(config), rig.trainer(config)
    expected = rig.update(alone, 0, handed)
    with somebody_loads():
        found = rig.update(beside, 0, handed)
    assert found.metrics == expected.metrics
    assert all(np.array_equal(rig.weights(beside)[name], value) for name, value in rig.weights(alone).items())
