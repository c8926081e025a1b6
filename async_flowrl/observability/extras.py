"""Extras of rewards in pictures; an extra is a text or number that a reward returns about an image beside its score."""

from collections.abc import Sequence
from typing import Any

from async_flowrl.types import Prompt, Scores


def captions(scores: Sequence[Scores]) -> list[list[str]]:
    """One line per prompt and image with the extras of all terms, texts before numbers; [] if no term has extras."""
    if not any(each.extras for each in scores):
        return []
    return [[_caption(each, image) for image in range(len(each.total))] for each in scores]


def picture_data(prompts: Sequence[Prompt], scores: Sequence[Scores]) -> list[dict[str, Any]]:
    """Per prompt a JSON-able dictionary: its text, and per image total, scores by term and extras by term and name."""
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
