"""Sentences that several refusals share: an unknown name with the nearest known one, and an error in one line."""

import difflib
from collections.abc import Callable, Iterable


def unknown_name(key: str, given: str, allowed: Iterable[str]) -> str:
    """One sentence: what was given, what is allowed, and the nearest match if there is one."""
    names = sorted(allowed)
    return f"{key} must be one of {', '.join(names)}, got {given!r}{did_you_mean(given, names)}"


def did_you_mean(given: str, names: Iterable[str], shown: Callable[[str], object] = repr) -> str:
    """`; did you mean 'x'?` for the nearest of `names`, written as `shown` says; empty where none is near."""
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)
    return f"; did you mean {shown(near[0])}?" if near else ""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
