"""Tables in Markdown, and their insertion into pages of the documentation, between two markers."""

from collections.abc import Iterable, Sequence
from pathlib import Path


def between_markers(page: str, name: str, text: str) -> str:
    """Returns `page` with `text` between its lines `<!-- name: begin -->` and `<!-- name: end -->`.

    Raises ValueError if a marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    if end not in rest:
        raise ValueError(f"the page has no place for {name}: it needs a line {begin} and, below it, a line {end}")
    return f"{before}{begin}\n{text.rstrip()}\n{rest[rest.index(end) :]}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def write_between(page: Path, name: str, text: str) -> None:
    """Replaces what stands between the two markers of a page by `text`, below an empty line; see `between_markers`."""
    page.write_text(between_markers(page.read_text(encoding="utf-8"), name, f"\n{text}"), encoding="utf-8")
