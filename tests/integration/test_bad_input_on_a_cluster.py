"""Tests of requests that an existing cluster cannot fulfil: refused in one sentence, with nothing started there."""

import sys
from pathlib import Path

import pytest

from async_flowrl.main import main


def answered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What is said of a command that is refused."""
    monkeypatch.setattr(sys, "argv", ["main", *arguments])
    code = main()
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    return said


@pytest.mark.slow
def test_more_than_an_existing_cluster_has(
    tmp_path: Path, existing_cluster: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = (f"runtime.address={existing_cluster}", f"output_dir={tmp_path / 'run'}")
    said = answered(capsys, monkeypatch, "rollout.num_workers=3", *there)
    rows = [line.split() for line in said.splitlines()]
    assert said.startswith("async_flowrl: the cluster can't hold what was asked:")
    assert ["resource", "asked", "exists", "missing"] in rows
    assert ["rollout", "3", "2", "1"] in rows
    large = ["rollout.resolution=512", "group_size=64", "prompts_per_step=8"]
    said = answered(capsys, monkeypatch, *large, *there)
    assert "GB of results and weights lie in the object store, which holds 0.1 GB" in said
    assert "max_staleness" in said
    assert len(said.splitlines()) == 1
    assert "is not empty" not in answered(capsys, monkeypatch, "total_steps=0", *there)
