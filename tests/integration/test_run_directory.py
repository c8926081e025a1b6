"""Tests of the files of a run directory and their keys, and of a resume from it."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

from async_flowrl.cli.before_after import evaluate
from async_flowrl.cli.evaluate import parser
from async_flowrl.cli.evaluation_job import job_of
from async_flowrl.cli.export_source import read_source, write_lora
from async_flowrl.config.compose import read_config
from async_flowrl.config.schema import Config
from async_flowrl.controller import checkpoints
from async_flowrl.controller.context import Context
from async_flowrl.controller.resume import Resume
from async_flowrl.policies.lora_file import FILE_NAME
from async_flowrl.run import job, recovery
from async_flowrl.training.checkpoint import checkpoint_step, find_checkpoint
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import Run, train, wait_until

STEPS = 6
FILES = f"""
    config.yaml .hydra/config.yaml .hydra/overrides.yaml metrics.jsonl events.jsonl timeline.json evaluations.jsonl
    images/step_000000.png images/step_000004.png images/step_000006.png checkpoints/latest
    checkpoints/step_4/manifest.json checkpoints/step_6/manifest.json lora/{FILE_NAME} report.html summary.json
    logs/controller.log logs/rollout-0.log logs/rollout-1.log logs/trainer-0.log logs/trainer-1.log logs/reward-0.log
"""
TOTALS = "wall_seconds images_per_s steady_images_per_s staleness_mean efficiency reward_first reward_last"
STATES = {"busy", "wait_data", "wait_weights", "sync", "idle"}


@pytest.fixture(scope="module")
def run(full_run: Run) -> Run:
    """As people start it, with everything that can be recorded."""
    return full_run


def test_files_and_nothing_else_but_the_lock_and_the_monitors(run: Run) -> None:
    """The configuration is the one that ran."""
    files = FILES.split()
    assert [name for name in files if not (run.root / name).stat().st_size and not name.startswith("logs/")] == []
    named = {name.split("/")[0] for name in files}
    assert {entry.name for entry in run.root.iterdir()} == named | {".lock", "tensorboard", "wandb"}
    assert {path.name for path in (run.root / "checkpoints").iterdir()} == {"step_4", "step_6", "latest"}
    assert (run.root / "checkpoints/latest").read_text().strip() == "step_6"
    config = read_config(run.root / "config.yaml")
    assert isinstance(config, Config)
    assert (config.total_steps, config.rollout.num_workers, config.group_size) == (STEPS, 2, 4)
    assert config.output_dir == str(run.root)
    assert "${" not in OmegaConf.to_yaml(OmegaConf.load(run.root / "config.yaml"))


def test_metrics(run: Run) -> None:
    assert run.column("step") == list(range(STEPS))
    assert run.column("policy_version") == list(range(STEPS))
    for line in run.metrics:
        numbers = [value for value in line.values() if isinstance(value, int | float)]
        assert len(numbers) > 40 and all(map(math.isfinite, numbers))
        assert [key for key, value in line.items() if value is None] == ["kl"]
        assert line["timing/step"] >= line["timing/update"] > 0
        assert line["timing/step"] > line["timing/publish"] > 0
        assert all(0 <= line[f"pool/{pool}/busy"] <= 1.001 for pool in ("rollout", "trainer", "reward"))
    key = "evaluation/reward/mean"
    evaluated = {line["step"]: line[key] for line in run.metrics if key in line}
    assert list(evaluated) == [3, 5]
    assert evaluated[3] != evaluated[5]
    assert run.metrics[0]["evaluation_before/color/mean"] == run.metrics[0]["evaluation_before/reward/mean"]


def test_summary(run: Run) -> None:
    summary = run.summary
    assert summary["steps"] == summary["total_steps"] == STEPS
    assert summary["images"] == STEPS * 8
    assert (summary["mode"], summary["max_staleness"], summary["placement"]) == ("one_step_off", 1, "separate")
    assert summary["workers"] == {"rollout": 2, "trainer": 2, "reward": 1}
    assert (summary["staleness_max"], summary["staleness_updates_max"]) == (1, 1)
    assert summary["staleness_mean"] == pytest.approx(5 / 6)
    assert all(isinstance(summary[key], float) for key in TOTALS.split())
    assert len(summary["weights_digest"]) == 64
    tickets = {"issued": 12, "trained": 12, "skipped": 0, "failed": 0, "retried": 0, "duplicate": 0}
    assert summary["tickets"] == tickets
    assert set(summary["gradient_kept"]) == {"0", "1"}
    assert set(summary["overlap"]) == {"seconds", "share"}
    assert summary["bound"]["seconds_per_step"] == max(summary["bound"]["generation"], summary["bound"]["update"])


def test_the_seconds_of_every_pool_are_the_wall_clock(run: Run) -> None:
    pools, wall = run.summary["pools"], run.summary["wall_seconds"]
    assert set(pools) == {"rollout", "trainer", "reward"}
    for seconds in pools.values():
        assert set(seconds) == STATES
        assert all(value >= 0 for value in seconds.values())
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.02)
        assert seconds["busy"] > 0


def test_events(run: Run) -> None:
    assert all({"time", "event"} <= set(event) for event in run.events)
    known = {"fetched", "inputs", "ticket", "version", "span", "state", "step", "worker"}
    assert {e["event"] for e in run.events} == known
    assert [e["ordinal"] for e in run.tickets("TRAINED")] == list(range(12))
    sent = {e["version"]: e["digest"] for e in run.events if e["event"] == "version" and e["state"] == "sent"}
    assert sorted(sent) == list(range(STEPS + 1))
    assert sent[STEPS] != sent[0]
    assert {e["version"] for e in run.tickets("RUNNING", kind="evaluation")} == {0, 4, 6}


def test_pictures_show_the_same_noise_with_other_weights(run: Run) -> None:
    sheets = [np.asarray(Image.open(run.root / f"images/step_{n:06d}.png")) for n in (0, 4, 6)]
    assert sheets[0].shape == sheets[1].shape == sheets[2].shape
    assert not np.array_equal(sheets[0], sheets[2])


def test_the_lora_in_a_fresh_pipeline_is_the_trained_model(run: Run, tmp_path: Path) -> None:
    """Its images earn what the run's last evaluation measured, with the same noise."""
    found = evaluate(job_of(parser().parse_args([str(run.root)]))).rows["reward"]
    before, after = run.metrics[0]["evaluation_before/reward/mean"], run.metrics[-1]["evaluation/reward/mean"]
    assert found["before"]["mean"] == pytest.approx(before, abs=1e-4)
    assert found["after"]["mean"] == pytest.approx(after, abs=1e-4)
    assert abs(after - before) > 0.01
    exported = write_lora(read_source(run.root), tmp_path)
    mine, theirs = load_file(run.root / "lora" / FILE_NAME), load_file(exported)
    assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def test_a_full_disk_does_not_keep_the_log_from_being_closed(tmp_path: Path) -> None:
    (tmp_path / "controller.log").symlink_to("/dev/full")
    handler = logging.FileHandler(tmp_path / "controller.log")
    logging.getLogger().addHandler(handler)
    logging.getLogger().error("there is no space for this line")
    job.end_log(tmp_path)
    assert handler not in logging.getLogger().handlers


def test_tensorboard(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.root / "tensorboard")).Reload()
    assert [(p.step, p.value) for p in found.Scalars("reward/mean")] == [
        (line["step"], pytest.approx(line["reward/mean"])) for line in run.metrics
    ]
    assert len(found.Images("images")) == 3


@pytest.mark.extended
@pytest.mark.parametrize(("tune", "steps"), [("lora", [0, 1, 2]), ("full", [0, 2])])
def test_without_a_setting_the_time_decides_when_a_lora_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: str, steps: list[int]
) -> None:
    monkeypatch.setattr(checkpoints, "SECONDS_BETWEEN", 0.0)
    train(tmp_path, "sync", "total_steps=2", "save.keep=9", f"tune={tune}")
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step_*")) == [f"step_{step}" for step in steps]


def test_resume_refuses_another_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "sync", "total_steps=1")
    other = ["total_steps=2", "trainer.learning_rate=1e-3", "seed=3"]
    train(tmp_path, "sync", *other, "resume=auto", code=2)
    *named, last = capsys.readouterr().err.splitlines()[1:]
    assert named == ["  seed was 0 and is 3", "  trainer.learning_rate was 0.003 and is 0.001"]
    assert "resume=force" in last
    for unfit in (
        "lora.rank=2",
        "tune=full",
        "lora.targets=[to_q]",
        "model.tiny.heads=4",
        "algorithm=diffusion_nft",
        "trainer.ema_decay=0.9",
        "algorithm.reference_every=2 algorithm.kl_coef=0.1",
        "algorithm.average_decay=half algorithm=awm",
    ):
        train(tmp_path, "sync", *other, *unfit.split(), "resume=force", code=2)
        told = capsys.readouterr().err
        assert f"  {unfit.partition('=')[0]}" in told and "resume=force" not in told, unfit
    train(tmp_path, "sync", *other, "resume=force")
    assert "seed was 0 and is 3" in capsys.readouterr().err
    damaged = tmp_path / "checkpoints/step_1/weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    train(tmp_path, "sync", "total_steps=2", f"resume={tmp_path}/checkpoints/step_1", code=2)
    assert "weights.safetensors" in capsys.readouterr().err


@pytest.mark.serial("runs")
def test_a_killed_driver_is_replaced_by_resume_and_only_one_may_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slowly = ["save.every=2", "disturb.update=0.5", "disturb.constant=true"]
    first = ForkedRun(tmp_path / "run", "one_step_off", "total_steps=500", *slowly)
    wait_until(first, lambda: (tmp_path / "run/logs/controller.log").exists(), "it had begun")
    train(tmp_path / "run", "one_step_off", *slowly, "resume=auto", code=2)
    told = capsys.readouterr().err
    assert "is in use by another running controller" in told
    assert len(told.splitlines()) == 1
    wait_until(first, lambda: len(list((tmp_path / "run/checkpoints").glob("step_*"))) >= 2, "a second checkpoint")
    first.kill()
    assert not (tmp_path / "run/summary.json").exists()
    newest = find_checkpoint(tmp_path / "run/checkpoints")
    assert newest is not None
    steps = checkpoint_step(newest) + 3
    resumed = train(tmp_path / "run", "one_step_off", f"total_steps={steps}", "resume=auto", "rollout.num_workers=2")
    assert [e["step"] for e in resumed.events if e["event"] == "rollback"] == [steps - 3]
    whole = train(tmp_path / "whole", "one_step_off", f"total_steps={steps}")
    assert resumed.digest == whole.digest
    assert resumed.column("step") == list(range(steps))
    for column in ("reward/mean", "staleness/max"):
        assert resumed.column(column) == whole.column(column)


@pytest.mark.extended
def test_no_process_has_to_live_once_the_training_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_to_the_end = job.train_with_recovery

    async def then_kill(run: recovery.Run, resume: Resume) -> Context:
        context = await train_to_the_end(run, resume)
        for group in run.groups.values():
            for worker in group.workers:
                worker.kill()
        return context

    average = "trainer.ema_decay=0.5"
    calm = train(tmp_path / "calm", "one_step_off", average)
    monkeypatch.setattr(job, "train_with_recovery", then_kill)
    killed = train(tmp_path / "killed", "one_step_off", average)
    assert killed.digest == calm.digest and killed.summary["failed"] == []
    ours, theirs = (load_file(run.root / "lora" / FILE_NAME) for run in (killed, calm))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())
