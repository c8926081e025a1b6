"""The benchmark measures what it says, on payloads small enough for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checkpoint_engine.benchmark.measure import memory_needed

ROOT = Path(__file__).parents[3]


def test_it_writes_a_table_and_the_same_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--megabytes", "1", "--receivers", "2", "--repeats", "1", "--kills", "1", "--out"]
    done = subprocess.run(
        [sys.executable, "-m", "checkpoint_engine.benchmark", *options, str(out)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [cell["transport"] for cell in result["cells"]] == ["object_store", "gloo"]
    for cell in result["cells"]:
        assert cell["fraction_of_primitive"] == cell["primitive_seconds"] / cell["delivery_seconds"]
        assert cell["stats"]["publishes"] == 3 and cell["stats"]["acknowledged"] == 6
        assert cell["stall_seconds"] > 0.0 and cell["activate_seconds"] > 0.0
    assert [kill["survivors"] for kill in result["after_kill"]] == [2, 2]
    assert result["skipped"] == [] and "| gloo | 1 | 2 |" in done.stdout


def test_what_does_not_fit_is_estimated_for_all_processes_together() -> None:
    assert memory_needed(850.0, 4) > memory_needed(850.0, 1) > 10.0
    assert memory_needed(5.0, 4) < 2.0
