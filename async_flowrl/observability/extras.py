"""Extras of rewards for single images, as pictures show and keep them."""

from collections.abc import Sequence
from typing import Any

from async_flowrl.types import Prompt, Scores


def captions(scores: Sequence[Scores]) -> list[list[str]]:
    """By prompt and image, the extras of all terms on one line, texts first; empty where no term has any."""
    if not any(each.extras for each in scores):
        return []
    return [[_caption(each, image) for image in range(len(each.total))] for each in scores]


def picture_data(prompts: Sequence[Prompt], scores: Sequence[Scores]) -> list[dict[str, Any]]:
    """By prompt its text, total, scores by term and extras by term and name, all in image order."""
    return [
        {
            "prompt": prompt.text,
            "total": list(each.total),
            "by_term": {name: list(values) for name, values in each.by_term.items()},
            "extras": {term: {name: list(values) for name, values in by.items()} for term, by in each.extras.items()},
        }
        for prompt, each in zip(prompts, scores, strict=True)
    ]


def _caption(scores: Scores, image: int) -> str:
    said = [(name, values[image]) for extras in scores.extras.values() for name, values in extras.items()]
    texts = [value for _, value in said if isinstance(value, str) and value]
    numbers = [f"{name} {value:.3g}" for name, value in said if not isinstance(value, str)]
    return " · ".join([*texts, *numbers])
