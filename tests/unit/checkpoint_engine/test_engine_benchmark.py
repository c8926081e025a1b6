"""Tests of the transport benchmark between Ray actors, on payloads small enough for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_engine.benchmark.__main__ import main
from checkpoint_engine.benchmark.measure import memory_needed
from checkpoint_engine.benchmark.report import BEGIN, END, report

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_it_writes_a_table_and_the_same_as_json(kills: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    options = ["--megabytes", "1", "--receivers", "1", "--repeats", "1", "--kills", str(kills), "--page", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "checkpoint_engine.benchmark", *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    on_gpus = ["nccl"] if torch.cuda.device_count() > 1 else []
    assert [cell["transport"] for cell in result["cells"]] == ["object_store", "gloo", *on_gpus]
    for cell in result["cells"]:
        assert cell["fraction_of_primitive"] == cell["primitive_seconds"] / cell["delivery_seconds"]
        assert 0.0 <= cell["loop_lag_p99_seconds"] <= cell["loop_lag_seconds"]
        assert cell["stats"]["publishes"] == cell["stats"]["acknowledged"] == 3 and cell["stats"]["fallbacks"] == 0
        assert cell["stall_seconds"] > 0.0 and cell["activate_seconds"] > 0.0
    assert [kill["survivors"] for kill in result["after_kill"]] == [2] * 2 * kills
    assert result["skipped"] == [] and "| gloo | 1 | 1 |" in done.stdout
    written = page.read_text()
    assert written == f"before\n{BEGIN}\n\n{done.stdout}\n{END}\nafter\n" and "old" not in written
    page.write_text("no markers")
    with pytest.raises(ValueError, match="has no place for the numbers"):
        main(["--read", str(out), "--page", str(page)])


def cell(transport: str, megabytes: float, fraction: float) -> dict[str, object]:
    keys = ("delivery_seconds", "primitive_seconds", "trainer_stall_memcpys", "worker_stall_memcpys")
    lag = {"loop_lag_p99_seconds": 0.01, "fraction_of_primitive": fraction}
    return {"transport": transport, "megabytes": megabytes, "receivers": 1, **dict.fromkeys(keys, 1.0), **lag}


def test_rows_that_miss_a_target_are_named_and_small_payloads_have_none() -> None:
    cells = [cell("gloo", 5.0, 0.1), cell("gloo", 50.0, 0.7), cell("gloo", 200.0, 0.9)]
    kills = [{"transport": "gloo", "megabytes": 50.0, "survivors": 2, "seconds": 7.0}]
    machine = {"cores": 2, "load": [1.0], "torch": "2"}
    text = report({"cells": cells, "after_kill": kills, "skipped": ["x"], "machine": machine, "repeats": 3})
    assert "fraction >= 0.8 at 50 MB and above: met by 1 of 2 rows, not by gloo 50 MB to 1\n" in text
    assert "trainer stall <= 1.5 copies at 50 MB and above: met by 2 of 2 rows\n" in text
    assert "within 5 s of a SIGKILL: 0 of 1" in text and "Not measured: x" in text


def test_what_does_not_fit_is_estimated_for_all_processes_together() -> None:
    assert 24.0 > memory_needed(850.0, 4) > memory_needed(850.0, 1) > 5.0
    assert memory_needed(5.0, 4) < 3.0
