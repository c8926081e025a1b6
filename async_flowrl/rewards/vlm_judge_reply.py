"""The judge's reply, a chat completion: reads a number in a range, a transcription, or probabilities of listed answers.

An unreadable reply raises JudgeError instead of scoring 0, because a broken judge must not look like a bad image.
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
"""Tolerance above 0 for log-probabilities, because servers round them."""
_NUMBER = re.compile(r"[\s*_:]*(-?\d+(?:\.\d+)?)(?![\d.]*\d)")
"""A number after a marker, also inside Markdown's asterisks."""
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


class JudgeError(ContractError):
    """Raised for a judge's answer without a usable score; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """The part of a reply that is used and stored.

    `cut` is True if the text ended at max_tokens. `first` holds the likeliest first tokens with their natural
    log-probabilities; it is empty if the server sends none.
    """

    text: str
    cut: bool
    first: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, content: bytes) -> "Answer":
        """Reads the body of a reply. Raises ContractError if it is not a finished chat completion."""
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
    """Returns the alternatives at the first token that is not white space; empty without any. Raises JudgeError."""
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
    """Returns True for a number of at most 0 (with LOGPROB_ROUNDING), also minus infinity; False for a bool."""
    if isinstance(value, int) and (isinstance(value, bool) or not is_number(value)):
        return False
    return value <= LOGPROB_ROUNDING


def scores_in(answer: Answer, count: int, bounds: tuple[float, float], *, group: bool) -> list[float]:
    """Returns `count` numbers within `bounds`, read from JSON.

    The answer is {"scores": [...]} for a group, else {"score": x} or a bare number. Raises JudgeError otherwise,
    also for a bare number that was cut off: "1" may be the beginning of "10".
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
    """Returns the number after the last `marker`, such as "Final Score: 4.5", with which some judges end their text.

    Raises JudgeError if there is none, or if the text was cut off, since the number may then be incomplete.
    """
    _, marked, rest = answer.text.rpartition(marker)
    number = _NUMBER.match(rest)
    if answer.cut or not marked or number is None:
        why = "is cut off at max_tokens" if answer.cut else f"has no number after {marker!r}"
        raise JudgeError(f"the judge's answer {why}: {_short(answer.text[-SHOWN_CHARACTERS:])}")
    return _bounded(float(number[1]), bounds)


def _refuse(constant: str) -> None:
    """Rejects NaN and infinity, which Python's parser accepts although JSON does not have them."""
    raise ValueError(constant)


def _bounded(value: object, bounds: tuple[float, float]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JudgeError(f"the judge answered {value!r} where a number was due")
    low, high = bounds
    if not low <= value <= high:
        raise JudgeError(f"the judge answered {value!r}, outside of {low:g} .. {high:g}")
    return float(value)


def transcription_score(answer: Answer, target: str) -> float:
    """Returns the reward `ocr` of the transcription: max(0, 1 - edit distance / n) for a target of n characters.

    A transcription that was cut off at max_tokens is scored if it has at least 2 n characters, since its edit distance
    cannot fall below n any more. Raises JudgeError if it is shorter.
    """
    if answer.cut and len(normalise(answer.text)) < 2 * len(normalise(target)):
        raise JudgeError(f"the transcription is cut off at max_tokens: {_short(answer.text)}")
    return text_score(answer.text, target)


def expected_value(answer: Answer, values: Mapping[str, float], *, min_mass: float) -> tuple[float, dict[str, float]]:
    """Returns the expected value of the listed answers, and each answer's probability among all tokens.

    Tokens are compared without case and white space, so " Yes" and "yes" are added up. Raises JudgeError if the server
    sends no log-probabilities, or if the listed answers together have less probability than `min_mass`.
    """
    if not answer.first:
        raise JudgeError("the server sends no log-probabilities (logprobs, top_logprobs): mode=score needs none")
    wanted = {name.casefold(): name for name in values}
    probabilities = dict.fromkeys(values, 0.0)
    for token, logprob in answer.first:
        if (name := wanted.get(token.strip().casefold())) is not None:
            probabilities[name] += math.exp(logprob)
    mass = sum(probabilities.values())
    if mass <= 0 or mass < min_mass:
        likely = ", ".join(repr(token) for token, _ in answer.first[:5])
        raise JudgeError(
            f"the listed answers hold {mass:.3g} of the probability, less than min_mass={min_mass:g}; the likeliest "
            f"tokens are {likely}"
        )
    return sum(probabilities[name] * value for name, value in values.items()) / mass, probabilities


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"
