"""Tests of runs with tune=full: they keep the promises of LoRA runs, and diffusers loads their models."""

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from async_flowrl.cli.before_after import evaluate
from async_flowrl.cli.evaluate import parser
from async_flowrl.cli.evaluation_job import job_of
from async_flowrl.cli.export import main as export
from async_flowrl.cli.generate import generate, open_pipeline, sample, sampling_of
from async_flowrl.cli.generate import main as generate_command
from async_flowrl.config.compose import read_config
from async_flowrl.policies import trained_file
from tests.integration.runs import Run, start, train, wait_until
from tests.integration.whole_weights import Received, check_all_changed_and_delivered, watched_receivers, whole

FULL = (
    "tune=full",
    "model.tiny.heads=2",
    "model.tiny.layers=2",
    "trainer.learning_rate=1e-3",
    "trainer.ema_decay=0.9",
    "trainer.ema_every=1",
    "save.every=1",
    "save.keep=3",
)
PROMPTS = ("red red red red", "blue blue blue blue")


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Received]:
    """Three steps, undisturbed, and what the rollout workers received."""
    folder = tmp_path_factory.mktemp("full") / "run"
    with watched_receivers() as received:
        return train(folder, "one_step_off", *FULL, "total_steps=3"), received


@pytest.fixture(scope="module")
def plain(watched: tuple[Run, Received]) -> Run:
    return watched[0]


def test_every_parameter_changed_and_the_whole_model_was_delivered(watched: tuple[Run, Received]) -> None:
    check_all_changed_and_delivered(*watched)


def test_a_resumed_run_is_the_undisturbed_one(plain: Run, tmp_path: Path) -> None:
    train(tmp_path, "one_step_off", *FULL, "total_steps=2")
    again = train(tmp_path, "one_step_off", *FULL, "total_steps=3", "resume=auto")
    assert again.digest == plain.digest and again.digests[-1] == plain.digests[-1]
    ours, theirs = whole(again), whole(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the average, too"


@pytest.mark.extended
def test_stream_and_one_process_are_sync(tmp_path: Path) -> None:
    short = (*FULL, "model.tiny.layers=1", "total_steps=2", "model.dtype=bfloat16", "rollout.num_workers=1")
    sync = train(tmp_path / "sync", "sync", *short)
    stream = train(tmp_path / "stream", "stream", *short)
    shared = train(tmp_path / "shared", "sync", *short, "placement=shared")
    assert sync.digests == stream.digests == shared.digests
    assert sync.sample_log == stream.sample_log == shared.sample_log
    assert len(set(sync.digests)) == 3
    assert {tensor.dtype for tensor in whole(sync).values()} == {torch.bfloat16}


def test_diffusers_own_pipeline_makes_the_runs_images(
    plain: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`evaluate` scores them as the run's last evaluation did, and `from_pretrained` of the export makes them."""
    from diffusers import AutoModel, DiffusionPipeline

    config = read_config(plain.root / "config.yaml")
    found = evaluate(job_of(parser().parse_args([str(plain.root)]))).rows["reward"]
    assert found["after"]["mean"] == pytest.approx(plain.metrics[-1]["evaluation/reward/mean"], abs=1e-4)
    how = config.model, sampling_of(config)
    pipeline = open_pipeline(*how, "cpu")
    before = sample(pipeline, *how, PROMPTS[0], [0, 1])
    trained_file.apply(pipeline, plain.root / "transformer")
    after = sample(pipeline, *how, PROMPTS[0], [0, 1])
    assert not np.array_equal(before, after)
    with caplog.at_level(logging.INFO):
        assert export([str(plain.root), str(tmp_path / "published")]) == 0
    assert f"wrote {tmp_path / 'published'}" in caplog.messages
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(plain.root / "config.yaml", unfinished)
    with pytest.raises(ValueError, match="--lora OUT/transformer"):
        job_of(parser().parse_args([str(unfinished)]))
    with pytest.raises(ValueError, match="published/transformer"):
        job_of(parser().parse_args([str(tmp_path / "published")]))
    exported = tmp_path / "published" / "transformer"
    assert job_of(parser().parse_args([str(unfinished), "--lora", str(exported)])).trained_weights == exported
    loaded: Any = DiffusionPipeline.from_pretrained(str(tmp_path / "published"))
    loaded.set_progress_bar_config(disable=True)
    assert np.array_equal(sample(loaded, *how, PROMPTS[0], [0, 1]), after)
    transformer = AutoModel.from_pretrained(str(plain.root / "transformer")).state_dict()
    assert all(torch.equal(transformer[name], tensor) for name, tensor in whole(plain).items())
    card = (tmp_path / "published" / "README.md").read_text()
    assert "trained by reinforcement learning" in card and "LoRA" not in card


@pytest.mark.extended
def test_the_commands_take_a_runs_transformer(plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--prompt", PROMPTS[0], "--images", "1", "--out", str(tmp_path / "grid.png")]
    assert generate_command(["--transformer", str(plain.root / "transformer"), *given]) == 0
    assert Image.open(tmp_path / "grid.png").width > 256, "before and after"
    capsys.readouterr()
    for folder, said in (("images", "config.json"), ("checkpoints/step_2", "export")):
        assert generate_command(["--transformer", str(plain.root / folder), *given]) == 2
        assert said in capsys.readouterr().err
    assert export([str(plain.root), str(tmp_path / "out"), "--format", "kohya"]) == 2
    assert not (tmp_path / "out").exists()
    config = read_config(plain.root / "config.yaml")
    (sheet,) = generate(config.model, sampling_of(config), None, PROMPTS[:1], seed=0, images=1)
    assert sheet.width < 256


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_a_killed_driver(tmp_path: Path, mode: str) -> None:
    deeper = ["max_staleness=3"] if mode == "fully_async" else []
    settings = (*FULL, "total_steps=4", "runtime.backend=local", *deeper)
    plain = train(tmp_path / "plain", mode, *settings)
    process = start(tmp_path / "killed", mode, *settings)
    wait_until(process, (tmp_path / "killed" / "checkpoints" / "step_2").exists, "its second checkpoint")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = train(tmp_path / "killed", mode, *settings, "resume=auto")
    assert again.digest == plain.digest and again.digests[-1] == plain.digests[-1]
