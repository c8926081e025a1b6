"""Insertion of measured tables into pages of the documentation, between two markers."""


def between_markers(page: str, name: str, text: str) -> str:
    """Returns `page` with `text` between its lines `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises ValueError if a marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    if end not in rest:
        raise ValueError(f"the page has no place for {name}: it needs a line {begin} and, below it, a line {end}")
    return f"{before}{begin}\n{text.rstrip()}\n{rest[rest.index(end) :]}"
