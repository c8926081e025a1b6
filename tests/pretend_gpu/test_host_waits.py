"""Tests of host waits for the device: none per denoising step, at most one per micro-batch."""

from collections import Counter
from dataclasses import replace

import pytest
from pretended.report import SYNC, Seen, watched

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from checkpoint_engine import Publisher
from tests.pretend_gpu.test_shared_ranks import counted
from tests.support import trainer_rig as rig
from tests.support.families import NAMES, how, model_config
from tests.support.tiny import request

MAX_WAITS_PER_TICKET = 4
MAX_WAITS_PER_MICRO_BATCH = 1


def settings(family: str) -> Config:
    config = rig.tiny_config()
    config.model = model_config(family)
    config.rollout.guidance_scale = 3.5 if family == "flux" else 0.0
    return config


def with_weights(config: Config) -> RolloutWorker:
    """A loaded worker that holds version 0."""
    worker = RolloutWorker(config, resolve_model(config.model), 0, "rollout-0")
    worker.load()
    publisher = Publisher(worker.engine.live_tensors(), alpha=config.lora.alpha, rank=config.lora.rank)
    publisher.stage(0)
    publisher.seal(0)
    worker.receiver.receive(*publisher.payload(0))
    return worker


def waits_of_a_ticket(worker: RolloutWorker, family: str, steps: int) -> Counter[Seen]:
    """Of the second ticket with the same prompt, its activation included."""
    asked = request(2, how=how(family, steps=steps), noise_steps=tuple(range(steps - 1)))
    worker.generate([replace(asked, version=0)])
    with watched(SYNC) as waits:
        worker.generate([replace(asked, version=0)])
    return waits


@pytest.mark.parametrize("family", NAMES)
def test_a_ticket_waits_four_times_at_most_whatever_its_steps(family: str) -> None:
    worker = with_weights(settings(family))
    few, many = (waits_of_a_ticket(worker, family, steps) for steps in (3, 6))
    assert many.total() == few.total(), many - few
    assert few.total() <= MAX_WAITS_PER_TICKET, few


@pytest.mark.parametrize("family", NAMES)
def test_a_micro_batch_waits_once_at_most(family: str) -> None:
    """Twice as many parts of the same group, which is cut in both cases."""
    found = {}
    for size in (2, 1):
        config = settings(family)
        config.prompts_per_step, config.rollout.num_inference_steps, config.trainer.micro_batch_size = 1, 3, size
        sampler, worker = rig.Sampler(config), rig.trainer(config)
        handed = [sampler.group(0, 0)]
        rig.update(worker, 0, handed)
        with watched(SYNC) as waits:
            rig.update(worker, 1, handed)
        found[config.group_size // size] = waits
    (fewer, less), (more, many) = sorted(found.items())
    assert counted(many) - counted(less) <= MAX_WAITS_PER_MICRO_BATCH * (more - fewer), many - less
