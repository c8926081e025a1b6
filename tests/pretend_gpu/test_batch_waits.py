"""Tests of host waits for the device in a batch of tickets (`rollout.tickets_per_batch` above 1).

None per denoising step, whatever the number of tickets, and for each ticket at most as many as a ticket alone has.
"""

from collections import Counter
from dataclasses import replace

import pytest
from pretended.report import SYNC, Seen, watched

from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.types import Prompt, RolloutRequest
from checkpoint_engine import Publisher
from tests.support import trainer_rig as rig
from tests.support.families import TWO_AND_SLOW, how, model_config
from tests.support.tiny import request

MAX_WAITS_PER_TICKET = 4
TEXTS = ("red red", "a very long prompt of blue and of green", "green")
GUIDANCE = {"flux": (1.0,), "flux2": (1.0,)}
"""Scales of true guidance that are tried, by family; (1.0, 3.0) if it is not here."""


def loaded(family: str) -> RolloutWorker:
    """A loaded worker that holds version 0."""
    config = rig.tiny_config()
    config.model = model_config(family)
    config.rollout.guidance_scale = 3.5 if family == "flux" else 0.0
    config.rollout.tickets_per_batch = len(TEXTS)
    worker = RolloutWorker(config, resolve_model(config.model), 0, "rollout-0")
    worker.load()
    publisher = Publisher(worker.engine.live_tensors(), alpha=config.lora.alpha, rank=config.lora.rank)
    publisher.stage(0)
    publisher.seal(0)
    worker.receiver.receive(*publisher.payload(0))
    return worker


def asked(family: str, count: int, steps: int, scale: float) -> list[RolloutRequest]:
    """Tickets of different prompts."""
    one = request(2, how=how(family, steps=steps, cfg=scale), noise_steps=tuple(range(steps - 1)))
    return [replace(one, version=0, ordinal=i, group=i, prompt=Prompt(i, TEXTS[i])) for i in range(count)]


def waits(worker: RolloutWorker, requests: list[RolloutRequest]) -> Counter[Seen]:
    """Of a batch whose prompts have been encoded, the activation included."""
    worker.generate(requests)
    with watched(SYNC) as found:
        worker.generate(requests)
    return found


@pytest.mark.parametrize("family", TWO_AND_SLOW)
def test_a_batch_waits_as_often_as_its_tickets_alone_whatever_its_steps(family: str) -> None:
    worker = loaded(family)
    for scale in GUIDANCE.get(family, (1.0, 3.0)):
        few, many = (waits(worker, asked(family, len(TEXTS), steps, scale)) for steps in (3, 6))
        assert many.total() == few.total(), many - few
        assert few.total() <= MAX_WAITS_PER_TICKET * len(TEXTS), few
        fewer = waits(worker, asked(family, 2, 3, scale))
        assert few.total() - fewer.total() <= MAX_WAITS_PER_TICKET * (len(TEXTS) - 2), few - fewer
