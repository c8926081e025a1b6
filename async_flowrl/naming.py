"""One way to say that a name is unknown."""

import difflib
from collections.abc import Iterable


def unknown_name(key: str, given: str, allowed: Iterable[str]) -> str:
    """One sentence: what was given, what is allowed, and the nearest match if there is one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{key} must be one of {', '.join(names)}, got {given!r}{hint}"
