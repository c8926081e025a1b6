"""Parts of error messages that several checks share, and loggers that are quiet for a while."""

import difflib
import inspect
import json
import logging
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


def unknown_name(key: str, name: object, allowed: Iterable[str]) -> str:
    """Returns one sentence with the given name, the allowed names, and the nearest match if there is one."""
    names = sorted(allowed)
    return f"{key} must be one of {', '.join(names)}, got {name!r}{did_you_mean(str(name), names)}"


def did_you_mean(
    name: str, names: Iterable[str], shown: Callable[[str], object] = repr, *, mistyped: bool = False
) -> str:
    """Returns `; did you mean 'x'?` for the nearest of `names`, formatted by `shown`; empty if none is similar.

    `mistyped`: names of models are alike without being the same, so only a typing error gets a hint: at most two
    characters more or less, and no other number.
    """
    known = list(names)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.9 if mistyped else 0.5)
    if mistyped:
        near = [one for one in near if abs(len(name) - len(one)) <= 2 and _digits(name) == _digits(one)]
    else:  # one word of a name, such as grpo: the name with which two others begin is the plain one
        words = [other for other in known if name in other.split("_")]
        near = [word for word in words if sum(other.startswith(f"{word}_") for other in known) > 1] or near or words
    return f"; did you mean {shown(near[0])}?" if near else ""


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))


def as_written(value: Any) -> str:
    """Returns a value as it is written on the command line, e.g. "null" for None."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace("Infinity", "inf")


def in_one_line(error: BaseException) -> str:
    """Returns type and text of an exception on one line; of an exception group, those of the first one in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def check_options(
    where: str, factory: Callable[..., Any], options: Iterable[str], *, beside: Container[str] = (), first: int = 0
) -> None:
    """Raises ValueError, which begins with `where`, for an option that is not a parameter of `factory`."""
    # The first `first` parameters and those in `beside` are passed by the caller, so they are not allowed as options.
    parameters = list(inspect.signature(factory).parameters.values())[first:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds and parameter.name not in beside]
    for option in options:
        if option not in names:
            allowed = unknown_name("an option", option, names) if names else f"it takes none, got {option!r}"
            raise ValueError(f"{where}: {allowed}")


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def shortened(text: str, most: int) -> str:
    """Returns the text with at most `most` characters; … is the last one of a text that was cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def parsed(text: str, where: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError, which begins with `where`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is damaged: {error}") from error


@contextmanager
def quieter(name: str, level: int) -> Iterator[None]:
    """Sets the level of the logger `name` inside the `with` block; loggers below it that have no level follow it."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
