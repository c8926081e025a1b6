"""Wordings that tickets ask text encoders for: those of one ticket, and those of a run in the order of their need."""

from collections.abc import Iterator
from itertools import islice

from async_flowrl.tickets.request import RequestBuilder, evaluation_sampling, sampling
from async_flowrl.types import Asked, Prompt, Sampling


def asked_of(prompt: Prompt, how: Sampling) -> list[Asked]:
    """The prompt, and with guidance its negative prompt."""
    asked: list[Asked] = [(prompt.wording, prompt.system, False)]
    if how.true_cfg_scale > 1:
        asked.append((prompt.negative_wording(how.negative_prompt), None, True))
    return asked


def upcoming(requests: RequestBuilder, limit: int) -> tuple[Asked, ...]:
    """The first `limit` different wordings that a run needs: of its evaluations, then of its steps.

    The order of the steps is the one without data.curriculum, which only puts prompts off.
    """
    return tuple(islice(dict.fromkeys(islice(_all(requests), STEPS_READ * limit)), limit))


STEPS_READ = 8
"""Tickets that are looked at for each wording wanted: of a short file every prompt comes many times."""


def _all(requests: RequestBuilder) -> Iterator[Asked]:
    config = requests.config
    ways = [evaluation_sampling(config), *([requests.baseline] if requests.baseline else [])]
    for prompt in requests.evaluation:
        for how in ways:
            yield from asked_of(prompt, how)
    how = sampling(config)
    for step in range(config.total_steps):
        for index in requests.sampler.step(step):
            yield from asked_of(requests.train[index], how)
