"""Tests of requests that an existing cluster cannot fulfil: refused in one sentence, with nothing started there."""

import sys
from pathlib import Path

import pytest

from async_flowrl.main import main


def answered(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What is said of a command that is refused."""
    monkeypatch.setattr(sys, "argv", ["main", *arguments])
    code = main()
    said = capfd.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    return said


def test_more_than_an_existing_cluster_has(
    tmp_path: Path, existing_cluster: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = (f"runtime.address={existing_cluster}", f"output_dir={tmp_path / 'run'}")
    said = answered(capfd, monkeypatch, "rollout.num_workers=3", *there)
    rows = [line.split() for line in said.splitlines()]
    assert said.startswith("async_flowrl: the cluster can't hold what was asked:")
    assert ["resource", "asked", "exists", "missing"] in rows
    assert ["rollout", "3", "2", "1"] in rows
    large = ["rollout.resolution=512", "group_size=64", "prompts_per_step=8"]
    said = answered(capfd, monkeypatch, *large, *there)
    assert "GB of results and weights lie in the object store, which holds 0.1 GB" in said
    assert "the images and trajectories of 2 steps, weights on their way to rollout workers, and the state" in said
    assert len(said.splitlines()) == 1
    assert "is not empty" not in answered(capfd, monkeypatch, "total_steps=0", *there)


@pytest.mark.slow
def test_nccl_on_an_existing_cluster_without_gpus(
    tmp_path: Path, existing_cluster: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known when the trainer's first rank has started, and before any model is loaded.

    By default: the sentence (tests/unit/test_transport_choice.py), and a cluster of the run's own (test_bad_input.py).
    """
    there = (f"runtime.address={existing_cluster}", f"output_dir={tmp_path / 'run'}")
    said = answered(capfd, monkeypatch, "checkpoint_engine.transport=nccl", *there)
    told = "async_flowrl: checkpoint_engine.transport: transport nccl needs weights on a GPU, here they are on cpu"
    assert said.splitlines()[-1].startswith(told)


@pytest.mark.slow
def test_a_store_without_room_for_the_state_of_a_rank(
    tmp_path: Path, existing_cluster: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tickets fit. What a successor takes over is known when the model is loaded, before anything trains."""
    there = (f"runtime.address={existing_cluster}", f"output_dir={tmp_path / 'run'}")
    ranks = ("trainer.num_workers=2", "trainer.gpus_per_worker=0", "trainer.shard=none", "lora.rank=2048")
    said = answered(capfd, monkeypatch, *ranks, "lora.alpha=2048", *there)
    assert "GB of results and weights lie in the object store, which holds 0.1 GB" in said
    assert "and the state that a trainer rank hands to the successor of a dead one; use fewer" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
