"""The reply of a judge, a chat completion: a number in a range, a transcription, or probabilities of listed answers.

A reply that does not say it is a JudgeError, never a score of 0: a broken judge must not look like a bad image.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_flowrl.rewards.http_contract import SHOWN_CHARACTERS, ContractError, is_number, loads
from async_flowrl.rewards.ocr import normalise, text_score

LOGPROB_ROUNDING = 1e-3
"""By so much a log-probability may exceed 0, since servers round them."""
_NUMBER = re.compile(r"[\s*_:]*(-?\d+(?:\.\d+)?)(?![\d.]*\d)")
"""Behind a marker, with Markdown's stars around it or not."""
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


class JudgeError(ContractError):
    """A judge's answer that is no score; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """What of a reply is read and kept: `first` has the likeliest first tokens and their natural log-probabilities."""

    text: str
    cut: bool
    first: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, content: bytes) -> "Answer":
        """From the body of the reply. Raises ContractError for what is no finished chat completion."""
        reply = loads(content, "the reply")
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            text = message.get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise JudgeError(f"the reply is no chat completion: {_short(reply)}") from error
        if reason not in ("stop", "length"):
            raise JudgeError(f"the judge ended with finish_reason {reason!r}: {_short(message)}")
        if not isinstance(text, str):
            raise JudgeError(f"the judge gave no text: {_short(message)}")
        return cls(text, reason == "length", _first_tokens(choice.get("logprobs")))


def _first_tokens(logprobs: Any) -> tuple[tuple[str, float], ...]:
    """The alternatives at the first token that is not blank; empty if the server sends none. Raises JudgeError."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not content:
        return ()
    try:
        for position in content:
            if position["token"].strip():
                return tuple((_token(each["token"]), _logprob(each["logprob"])) for each in position["top_logprobs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise JudgeError(f"the reply's logprobs are not those of a chat completion: {_short(content)}") from error
    return ()


def _token(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _logprob(value: object) -> float:
    if isinstance(value, int | float) and is_log_probability(value):
        return float(value)
    raise JudgeError(f"the reply has {value!r} where a log-probability was due")


def is_log_probability(value: float) -> bool:
    """At most 0 but for rounding, minus infinity among them; no truth value, and no integer that is beyond float's."""
    if isinstance(value, int) and (isinstance(value, bool) or not is_number(value)):
        return False
    return value <= LOGPROB_ROUNDING


def scores_in(answer: Answer, count: int, bounds: tuple[float, float], *, group: bool) -> list[float]:
    """`count` numbers within `bounds`: {"scores": [...]} for a group, else {"score": x} or a bare number.

    Raises JudgeError, also for a bare number that was cut off, of which "1" may be the beginning of "10".
    """
    fenced = _FENCE.match(answer.text.strip())
    try:
        said = json.loads(fenced.group(1) if fenced else answer.text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        cut = ", cut off at max_tokens" if answer.cut else ""
        raise JudgeError(f"the judge's answer is no JSON{cut}: {_short(answer.text)}") from None
    if answer.cut and not isinstance(said, dict | list):
        raise JudgeError(f"the judge's answer is a number cut off at max_tokens: {_short(answer.text)}")
    key = "scores" if group else "score"
    if isinstance(said, dict):
        if key not in said:
            raise JudgeError(f"the judge's answer has no {key!r}: {_short(answer.text)}")
        said = said[key]
    values = said if group else [said]
    if not isinstance(values, list) or len(values) != count:
        raise JudgeError(f"the judge was asked for {count} scores and answered {_short(answer.text)}")
    return [_bounded(value, bounds) for value in values]


def score_after(answer: Answer, marker: str, bounds: tuple[float, float]) -> float:
    """The number behind the last `marker` of a text, which some judges are trained to end with ("Final Score: 4.5").

    Raises JudgeError where there is none, and for a text that was cut off, whose number may lack its end.
    """
    _, found, rest = answer.text.rpartition(marker)
    number = _NUMBER.match(rest)
    if answer.cut or not found or number is None:
        why = "is cut off at max_tokens" if answer.cut else f"has no number after {marker!r}"
        raise JudgeError(f"the judge's answer {why}: {_short(answer.text[-SHOWN_CHARACTERS:])}")
    return _bounded(float(number[1]), bounds)


def _refuse(constant: str) -> None:
    """NaN and infinity, which Python would read and JSON does not have."""
    raise ValueError(constant)


def _bounded(value: object, bounds: tuple[float, float]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JudgeError(f"the judge answered {value!r} where a number was due")
    low, high = bounds
    if not low <= value <= high:
        raise JudgeError(f"the judge answered {value!r}, outside of {low:g} .. {high:g}")
    return float(value)


def transcription_score(answer: Answer, target: str) -> float:
    """1 - min(edit distance, n) / n for a target of n characters, as `ocr` has it: 1 where the target is contained.

    A transcription that was cut off at max_tokens counts once it is so long that its rest could no longer lower the
    distance below n (2 n characters); a shorter one is a JudgeError.
    """
    if answer.cut and len(normalise(answer.text)) < 2 * len(normalise(target)):
        raise JudgeError(f"the transcription is cut off at max_tokens: {_short(answer.text)}")
    return text_score(answer.text, target)


def expected_value(answer: Answer, values: Mapping[str, float], *, min_mass: float) -> tuple[float, dict[str, float]]:
    """The expectation of `values` over the listed answers, and each answer's probability among all tokens.

    Tokens are compared without case and blanks, so " Yes" and "yes" add up. Raises JudgeError where the listed answers
    hold less than `min_mass` of the probability.
    """
    if not answer.first:
        raise JudgeError("the server sends no log-probabilities (logprobs, top_logprobs): mode=score needs none")
    wanted = {name.casefold(): name for name in values}
    found = dict.fromkeys(values, 0.0)
    for token, logprob in answer.first:
        if (name := wanted.get(token.strip().casefold())) is not None:
            found[name] += math.exp(logprob)
    mass = sum(found.values())
    if mass <= 0 or mass < min_mass:
        likely = ", ".join(repr(token) for token, _ in answer.first[:5])
        raise JudgeError(
            f"the listed answers hold {mass:.3g} of the probability, less than min_mass={min_mass:g}; the likeliest "
            f"tokens are {likely}"
        )
    return sum(found[name] * value for name, value in values.items()) / mass, found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
