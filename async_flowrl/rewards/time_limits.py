"""A check before a run: whether the slowest server calls of each term can end within `deadlines.score`."""

import math
from collections.abc import Iterator
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.config.sections.reward import RewardTerm
from async_flowrl.rewards.registry import resolve_term
from async_flowrl.rewards.waves import Waves


def too_slow(config: Config) -> list[str]:
    """Returns a sentence for every term whose server calls for a group may take longer than `deadlines.score`.

    At that deadline the worker is killed, its replies are lost, and the failure does not name the server. Rewards state
    their calls by `waves(images, **options)`; a term without it is skipped. Raises ValueError if a reward cannot be
    found.
    """
    allowed = config.deadlines.score
    sentences = []
    for where, images, name, term in _asked(config):
        made: Any = getattr(resolve_term(name, term), "waves", None)
        waves: Waves | None = made(images, **term.options) if made is not None else None
        if waves is not None and waves.seconds > allowed:
            sentences.append(
                f"{where}.{name}: {images} images are {waves}, more than deadlines.score={allowed:g}, at which the "
                f"worker is killed with the answers that it has; use deadlines.score={_round(waves.seconds)}, or in "
                f"its options a shorter deadline" + (" or more concurrency" if waves.calls > waves.concurrency else "")
            )
    return sentences


def _asked(config: Config) -> Iterator[tuple[str, int, str, RewardTerm]]:
    """Yields for each term: its section, the largest number of images in one call, its name and the term."""
    evaluated = config.evaluate.images_per_prompt  # every run has an evaluation, at its end
    for name, term in config.reward.terms.items():
        yield "reward.terms", max(config.group_size, evaluated), name, term
    for name, term in config.evaluate.reward.terms.items():
        yield "evaluate.reward.terms", evaluated, name, term


def _round(seconds: float) -> int:
    """Adds 30 seconds and rounds up to whole minutes."""
    return math.ceil((seconds + 30.0) / 60.0) * 60
