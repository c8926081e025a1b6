"""Tests of compiled blocks in a process that samples and trains: the bits of two processes.

The two networks share what is compiled, and one sees the shapes of tickets, the other those of micro-batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.shared.shared_worker import SharedWorker
from async_flowrl.training.trainer_worker import TrainerWorker
from tests.support import trainer_rig as rig


def config(*, compiled: bool) -> Config:
    """Tickets of four images, micro-batches of two."""
    made = rig.tiny_config(micro_batch_size=2, compile=compiled)
    made.placement, made.model.dtype, made.model.tiny.layers = "shared", "float32", 1
    made.rollout.compile, made.rollout.num_inference_steps = compiled, 2
    return made


class Sampled(rig.Sampler):
    """Makes groups with the network that a worker samples with."""

    def __init__(self, config: Config, worker: RolloutWorker) -> None:
        self.config, self.engine = config, worker.engine  # type: ignore[assignment]

    def latents(self, step: int) -> Any:
        return np.stack([self.group(step, group)[1][0].latents for group in range(self.config.prompts_per_step)])


def trained(worker: TrainerWorker, handed: list[rig.Handed]) -> str:
    rig.update(worker, 0, handed)
    return worker.parameters.fingerprint()


@contextmanager
def own_compiler() -> Iterator[None]:
    """Context in which nothing is compiled yet, as on a node of its own: also the cache on disk is empty."""
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        yield


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_compiled_blocks_of_one_process_compute_what_those_of_two_do() -> None:
    given, plain = config(compiled=True), config(compiled=False)
    model, sampler = resolve_model(given.model), rig.Sampler(plain)
    handed = [sampler.group(0, group) for group in range(given.prompts_per_step)]
    with own_compiler():
        one = SharedWorker(given, model, 0, "shared-0")
        one.rollout.load()
        one.trainer.load()
        together = Sampled(given, one.rollout)
        before, digest, after = together.latents(0), trained(one.trainer, handed), together.latents(1)
    trainer, rollout = TrainerWorker(given, model, 0, "trainer-0"), RolloutWorker(given, model, 0, "rollout-0")
    with own_compiler():
        trainer.load()
        assert digest == trained(trainer, handed)
    with own_compiler():
        rollout.load()
        alone = Sampled(given, rollout)
        assert np.array_equal(before, alone.latents(0)) and np.array_equal(after, alone.latents(1))
    eager = TrainerWorker(plain, model, 0, "trainer-0")
    eager.load()
    assert digest != trained(eager, handed), "nothing was compiled: not even the last bits differ"
