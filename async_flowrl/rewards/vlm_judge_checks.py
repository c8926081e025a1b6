"""Checks of the options of the reward `vlm_judge`; each error message is one sentence."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.rewards.endpoint import checked_urls
from async_flowrl.rewards.vlm_judge_request import SCORE, TEMPLATES, TRANSCRIBE, placeholders_of

ONE_BY_ONE, GROUP = "one_by_one", "group"
MAX_TOP_LOGPROBS = 20
"""Limit of OpenAI, and of vLLM unless it is started with another one."""


def urls_of(given: str | Sequence[str] | None) -> list[str]:
    """Returns the URLs of chat completions below `base_url`, empty for None. Raises ValueError for a wrong URL."""
    what = "the vlm_judge reward's base_url"
    urls = checked_urls(what, given, "http://127.0.0.1:8000/v1", "api_key_env")
    for url in urls:
        if url.endswith("/chat/completions"):
            raise ValueError(f"{what} ends before /chat/completions, got {url!r}")
    return [f"{url}/chat/completions" for url in urls]


def check_mode(mode: str, images: str, after: str | None) -> None:
    """Raises ValueError for an unknown `mode` or `images`, and for combinations that do not work.

    `images=group` needs mode=score; `after` needs mode=score and images=one_by_one.
    """
    for key, given, allowed in (("mode", mode, tuple(TEMPLATES)), ("images", images, (ONE_BY_ONE, GROUP))):
        if given not in allowed:
            raise ValueError(unknown_name(f"the vlm_judge reward's {key}", str(given), allowed))
    if images == GROUP and mode != SCORE:
        raise ValueError(f"the vlm_judge reward's images=group needs mode=score, got mode={mode}")
    if after is not None and (not after.strip() or mode != SCORE or images == GROUP):
        raise ValueError(
            f"the vlm_judge reward's after is the text before the number in a free answer; it needs mode={SCORE} and "
            f"images={ONE_BY_ONE}, got {after!r} with mode={mode} and images={images}"
        )


def check_template(template: str, mode: str) -> set[str]:
    """Returns the names in braces. Raises ValueError for unknown names, or if the question would ignore the prompt."""
    names = placeholders_of(template)
    if mode != TRANSCRIBE and not names & {"prompt", "target"}:
        raise ValueError(
            f"the vlm_judge reward's prompt_template must contain {{prompt}} or {{target}}, got {template!r}"
        )
    return names


def check_numbers(options: Mapping[str, Any]) -> None:
    """Raises ValueError for a numeric option that is not a number, or is out of its range."""
    for name, low, high in (
        ("temperature", 0.0, 2.0),
        ("min_mass", 0.0, 1.0),
        ("timeout", 0.001, math.inf),
        ("deadline", 0.001, math.inf),
        ("retries", 0, math.inf),
        ("concurrency", 1, math.inf),
        ("max_tokens", 1, math.inf),
        ("top_logprobs", 1, MAX_TOP_LOGPROBS),
    ):
        value, whole = options[name], isinstance(low, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ValueError(f"the vlm_judge reward's {name} must be {kind} {limit}, got {value!r}")
    if options["deadline"] < options["timeout"]:
        raise ValueError(
            f"the vlm_judge reward's deadline={options['deadline']:g} is shorter than one attempt, "
            f"timeout={options['timeout']:g}"
        )


def bounds_of(given: Sequence[float]) -> tuple[float, float]:
    """Returns `range` as (low, high). Raises ValueError unless it is two finite rising numbers."""
    numbers = [x for x in given if isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)]
    if len(given) != 2 or len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ValueError(f"the vlm_judge reward's range must be two rising numbers, got {list(given)!r}")
    return float(numbers[0]), float(numbers[1])


def answers_of(given: Mapping[Any, Any]) -> dict[str, float]:
    """Returns `answers` as text → finite number.

    Raises ValueError for fewer than two answers, for wrong types, and if one answer begins with another one, since only
    the first token is read.
    """
    for name in given:
        if isinstance(name, bool):
            raise ValueError(f"the vlm_judge reward's answers have {name} for a name: put yes and no in quotes")
    answers = {str(name).strip(): value for name, value in given.items()}
    if len(answers) < 2:
        raise ValueError(f"the vlm_judge reward's answers must be two or more, got {dict(given)!r}")
    for name, value in answers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"the vlm_judge reward's answers must have finite numbers, got {name!r}: {value!r}")
    names = sorted(name.casefold() for name in answers)
    for shorter, longer in itertools.pairwise(names):
        if longer.startswith(shorter) or not shorter:
            raise ValueError(
                f"the vlm_judge reward's answers {shorter!r} and {longer!r} begin alike, and only their first token is "
                "read"
            )
    return {name: float(value) for name, value in answers.items()}
