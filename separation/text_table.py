from collections.abc import Callable, Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, align: Callable[[str, int], str] = str.ljust
) -> str:
    """Returns a table with two spaces between columns and one line per row. `align` is str.ljust or str.rjust."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )
