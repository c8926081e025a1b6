"""One way to say that a name is unknown, and one to quote an error."""

import difflib
from collections.abc import Iterable


def unknown_name(key: str, given: str, allowed: Iterable[str]) -> str:
    """One sentence: what was given, what is allowed, and the nearest match if there is one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key} must be one of {', '.join(names)}, got {given!r}{hint}"


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
