"""Writes report files; used by a run at its end, by the report command and after predictions of the planner."""

from pathlib import Path

from async_flowrl.report.document import document
from async_flowrl.report.page import render


def write_report(run: Path) -> Path:
    """Writes `run`/report.html from the run's files and returns its path; raises as `document` does."""
    return write_page([run], run / "report.html")


def write_page(runs: list[Path], path: Path, *, max_mib: float | None = None) -> Path:
    """Writes one page about these runs to `path` and returns it; `max_mib` as in `page.render`.

    The text goes to a temporary file in the same folder, which is then renamed, so `path` is always complete.
    """
    page = render(document(runs), max_mib=max_mib)
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path
