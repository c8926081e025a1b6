"""Extras of rewards, in pictures and as means; an extra is a text or number about an image, beside its score."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from async_flowrl.types import Prompt, Scores


def extra_means(groups: Iterable[Mapping[str, Mapping[str, Sequence[float | str]]]]) -> dict[str, dict[str, float]]:
    """Term → name of a numeric extra → its mean over all images for which the term returned it; sorted by name.

    Each group is term → name → values, as `Scores.extras`.
    """
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for extras in groups:
        for term, by_name in extras.items():
            for name, each in by_name.items():
                values[term, name] += [value for value in each if not isinstance(value, str)]
    means: dict[str, dict[str, float]] = {}
    for (term, name), numbers in sorted(values.items()):
        if numbers:
            means.setdefault(term, {})[name] = float(np.mean(numbers))
    return means


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
