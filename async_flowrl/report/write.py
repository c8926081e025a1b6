"""report.html of a run directory, as a run and the planner write it."""

from pathlib import Path

from async_flowrl.report.document import document
from async_flowrl.report.page import render


def write_report(run: Path) -> Path:
    """Writes it anew from the run's files, whole or not at all, and returns its path."""
    return write_page([run], run / "report.html")


def write_page(runs: list[Path], path: Path, *, max_mib: float | None = None) -> Path:
    """The report about these runs."""
    page = render(document(runs), max_mib=max_mib)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path
