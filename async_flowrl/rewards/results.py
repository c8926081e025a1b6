"""Checks of the values that rewards return: numbers, or one mapping per image with `score` and extras.

Extras are further numbers or strings about an image, which are logged beside the score.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from async_flowrl.rewards.base import RewardError

MAX_SCORE = 1e30
"""Largest magnitude of a score. Losses are computed in float32, whose largest number is about 3.4e38."""
MAX_EXTRAS, MAX_CHARACTERS = 32, 500
"""Largest number of extras of a term, and of characters of a text extra; a longer text is cut."""
STATISTICS = ("mean", "std", "group_std", "zero_std_ratio", "missing", "failures", "retries")
"""Names of a term's own metrics (`reward/<term>/mean`); an extra of such a name is refused."""
_NAME = re.compile(r"[A-Za-z_][\w.-]*")

Extra = float | str


@dataclass(frozen=True)
class Result:
    """The scores of n images by one term, and its extras: name → n values."""

    scores: tuple[float, ...]
    extras: Mapping[str, tuple[Extra, ...]] = field(default_factory=dict)


def group_result(where: str, returned: object, count: int) -> Result:
    """Checks what a reward returned for `count` images.

    `returned` is a sequence of numbers (a list, an array, a tensor) or of mappings with the same keys. Raises
    RewardError, whose message begins with `where`, if it is anything else.
    """
    if isinstance(returned, Sequence) and any(isinstance(each, Mapping) for each in returned):
        if len(returned) != count:
            raise RewardError(f"{where} must return {count} results, got {len(returned)}")
        return joined(where, [image_result(where, each) for each in returned])
    values = _numbers(where, returned, count)
    if values.shape != (count,):
        raise RewardError(f"{where} must return {count} finite numbers, got shape {list(values.shape)}: {returned!r}")
    return Result(_checked(where, values, count))


def image_result(where: str, returned: object) -> Result:
    """Checks what a reward returned for one image: a number or a mapping. Raises RewardError if it is anything else."""
    if not isinstance(returned, Mapping):
        values = _numbers(where, returned, 1)
        if values.size != 1:
            raise RewardError(f"{where} must return one finite number, got shape {list(values.shape)}: {returned!r}")
        return Result(_checked(where, values.reshape(1), 1))
    if "score" not in returned:
        raise RewardError(f"{where} must return a mapping with 'score', got the keys {sorted(map(str, returned))}")
    scores = image_result(where, returned["score"]).scores
    extras = {name: (_extra(where, name, value),) for name, value in returned.items() if name != "score"}
    if len(extras) > MAX_EXTRAS:
        raise RewardError(f"{where} must return at most {MAX_EXTRAS} extras, got {len(extras)}")
    return Result(scores, extras)


def joined(where: str, results: Sequence[Result]) -> Result:
    """Joins the results of single images. Raises RewardError unless all have the same extras, as numbers or as text."""
    kinds = [{name: isinstance(values[0], str) for name, values in result.extras.items()} for result in results]
    for one in kinds:
        if one != kinds[0]:
            raise RewardError(
                f"{where} must say the same of every image, got the extras {sorted(kinds[0])} and {sorted(one)} (or "
                "one as a number here and as text there)"
            )
    extras = {name: tuple(result.extras[name][0] for result in results) for name in sorted(kinds[0])}
    return Result(tuple(result.scores[0] for result in results), extras)


def check_size(where: str, number: float) -> None:
    """Raises RewardError if the magnitude of `number` is above MAX_SCORE."""
    if abs(number) > MAX_SCORE:
        raise RewardError(f"{where} is {number:g}; numbers beyond {MAX_SCORE:g} overflow in the loss: scale them down")


def _numbers(where: str, returned: object, count: int) -> np.ndarray[Any, Any]:
    wanted = f"{where} must return " + ("one finite number" if count == 1 else f"{count} finite numbers")
    try:
        values = np.asarray(returned)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors of a GPU or with a gradient
        raise RewardError(f"{wanted}, got {returned!r}: {error}") from error
    if values.size and values.dtype.kind not in "biuf":
        raise RewardError(f"{wanted}, got {returned!r}")
    return values.astype(np.float64)


def _checked(where: str, values: np.ndarray[Any, Any], count: int) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if not all(math.isfinite(number) for number in numbers):
        wanted = "one finite number" if count == 1 else f"{count} finite numbers"
        raise RewardError(f"{where} must return {wanted}, got {list(numbers)}")
    for number in numbers:
        check_size(f"{where}: a score", number)
    return numbers


def _extra(where: str, name: object, value: object) -> Extra:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RewardError(f"{where}: an extra's name must be a word of letters, digits, '_', '-' and '.', got {name!r}")
    if name in STATISTICS:
        raise RewardError(f"{where}: an extra must not be called {name!r}, which metrics use for the score itself")
    if isinstance(value, str):
        return value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 1] + "…"
    if isinstance(value, Real | np.bool_ | np.ndarray) or hasattr(value, "__array__"):
        return image_result(f"{where}: the extra {name!r}", value).scores[0]
    raise RewardError(f"{where}: the extra {name!r} must be a finite number or a string, got {type(value).__name__}")
