"""Test of the benchmark of the delivery of whole weights, on weights small enough for a test."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.whole_weights import COLUMNS, main


@pytest.mark.usefixtures("ray_here")
def test_it_writes_its_table_into_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the cluster of this process."""
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("before\n<!-- delivery: begin -->\nold\n<!-- delivery: end -->\nafter\n")
    sizes = ["--megabytes", "0.5", "--receivers", "2", "--repeats", "1"]
    main([*sizes, "--bucket", "150000", "--page", str(page), "--out", str(out)])
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert tuple(row) == COLUMNS and 0.0 < row["gather s"] < row["delivery s"] and row["publish s"] > 0.0
    before, written, after = re.split(r"<!-- delivery: (?:begin|end) -->", page.read_text())
    assert (before, after) == ("before\n", "\nafter\n")
    assert written.startswith("\n\n| MB |") and "| 0.5 | 2 |" in written and "| 0.5 | 2 |" in capsys.readouterr().out
