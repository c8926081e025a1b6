"""Measured tables on pages of documentation, each between two markers."""


def between_markers(page: str, name: str, text: str) -> str:
    """`page` with `text` between its lines `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises ValueError where they are missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    if end not in rest:
        raise ValueError(f"the page has no place for {name}: it needs a line {begin} and, below it, a line {end}")
    return f"{before}{begin}\n{text.rstrip()}\n{rest[rest.index(end) :]}"
