"""Tests of the transport benchmark between Ray actors, on payloads small enough for a test."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.delivery.__main__ import main
from tests.integration.runs import ROOT

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def options(tmp_path: Path, kills: int) -> list[str]:
    """Arguments of a short benchmark, which writes `out.json` and into `page.md`."""
    (tmp_path / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    sizes = ["--megabytes", "1", "--receivers", "1", "--repeats", "1", "--kills", str(kills)]
    return [*sizes, "--page", str(tmp_path / "page.md"), "--out", str(tmp_path / "out.json")]


def check(tmp_path: Path, printed: str, kills: int) -> None:
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    on_gpus = ["nccl"] if torch.cuda.device_count() > 1 else []
    assert [cell["transport"] for cell in result["cells"]] == ["object_store", "gloo", *on_gpus]
    for cell in result["cells"]:
        assert cell["fraction_of_primitive"] == cell["primitive_seconds"] / cell["delivery_seconds"]
        assert 0.0 <= cell["loop_lag_p99_seconds"] <= cell["loop_lag_seconds"]
        assert cell["stats"]["publishes"] == cell["stats"]["acknowledged"] == 3 and cell["stats"]["fallbacks"] == 0
        assert cell["stall_seconds"] > 0.0 and cell["activate_seconds"] > 0.0
    assert [kill["survivors"] for kill in result["after_kill"]] == [2] * 2 * kills
    assert result["skipped"] == [] and "| gloo | 1 | 1 |" in printed
    written = (tmp_path / "page.md").read_text()
    assert written == f"before\n{BEGIN}\n\n{printed}{END}\nafter\n" and "old" not in written


@pytest.mark.usefixtures("ray_here")
def test_it_writes_a_table_and_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the cluster of this process."""
    main(options(tmp_path, kills=0))
    check(tmp_path, capsys.readouterr().out, kills=0)
    (tmp_path / "page.md").write_text("no markers")
    with pytest.raises(ValueError, match="has no place for numbers"):
        main(["--read", str(tmp_path / "out.json"), "--page", str(tmp_path / "page.md")])


@pytest.mark.slow
def test_the_command_starts_a_cluster_and_measures_after_a_kill(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.delivery", *options(tmp_path, kills=1)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path, done.stdout, kills=1)
