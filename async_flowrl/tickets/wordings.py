"""The texts that text encoders must encode: for one prompt, and for a whole run in the order in which it needs them.

Rollout workers with `rollout.text_encoder=cached` use the order to encode many texts at once, ahead of their use.
"""

from collections.abc import Iterator
from itertools import islice

from async_flowrl.tickets.request import RequestBuilder, evaluation_sampling, sampling
from async_flowrl.types import Asked, Prompt, Sampling


def asked_of(prompt: Prompt, how: Sampling) -> list[Asked]:
    """Returns what is encoded for `prompt`: the prompt and, with classifier-free guidance, its negative prompt."""
    asked: list[Asked] = [(prompt.wording, prompt.system, False)]
    if how.true_cfg_scale > 1:
        asked.append((prompt.negative_wording(how.negative_prompt), None, True))
    return asked


def upcoming(requests: RequestBuilder, limit: int) -> tuple[Asked, ...]:
    """Returns the first different texts that a run needs, at most `limit`: those of evaluations, then of its steps.

    The curriculum is not considered: it can only delay a prompt. At most MAX_TEXTS_READ_PER_TEXT × `limit` texts are
    read, so a file with few prompts gives fewer.
    """
    return tuple(islice(dict.fromkeys(islice(_all(requests), MAX_TEXTS_READ_PER_TEXT * limit)), limit))


MAX_TEXTS_READ_PER_TEXT = 8
"""Most texts that `upcoming` reads per text that it may return; with few prompts, most texts are repetitions."""


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
