"""Tests of an early end by Ctrl-C, SIGTERM or time_limit: a resumed run has the weights of an undisturbed one."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from async_flowrl.config import exit_codes
from async_flowrl.training.checkpoint_folder import find_checkpoint
from async_flowrl.training.checkpoint_manifest import verify_checkpoint
from separation.processes import alive, descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import Run, finish, lines, start, train, wait_until

SLOWLY = ("save.every=1", "debug.delays.update=0.3", "debug.delays.constant=true")
LONG = "total_steps=500"
"""Two and a half minutes at least with `SLOWLY`: such a run does not end by itself while a test looks at it."""
SOON = 120.0
"""Seconds, for a machine that is busy with other things; a quiet one needs about three."""


def ended(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + SOON
    while any(alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(alive(process) for process in processes)


def quiet(err: str) -> bool:
    """Nothing was said but, on a busy machine, of processes that had to be killed since they took their time to end."""
    return all("which outlived its cluster" in line for line in err.splitlines())


def sound(folder: Path) -> list[int]:
    """Steps of the checkpoints there; every one of them must load."""
    found = [path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_")]
    for path in found:
        verify_checkpoint(path)
    return sorted(int(path.name.removeprefix("step_")) for path in found)


@pytest.mark.serial
@pytest.mark.parametrize("moment", ["starting", pytest.param("training", marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY)
    if moment == "training":
        wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    else:
        begun = folder / "logs/controller.log"
        wait_until(process, lambda: begun.exists() and descendants(process.pid), "the first daemon of its cluster")
    everything = descendants(process.pid)
    assert len(everything) >= (3 if moment == "training" else 1)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = finish(process, exit_codes.INTERRUPTED)
    assert time.monotonic() - began < SOON
    assert err.endswith("async_flowrl: interrupted\n") and quiet(err.removesuffix("async_flowrl: interrupted\n")), err
    assert "Traceback" not in out
    assert ended(everything), "nothing may be left running"
    assert not (folder / "summary.json").exists()
    if moment == "training":
        assert sound(folder)[-1] >= 1
    else:
        assert not sound(folder)


@pytest.mark.serial("ranks")
def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = ForkedRun(folder, "one_step_off", LONG, *SLOWLY)
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.poll() == exit_codes.INTERRUPTED, said
    assert said.endswith("async_flowrl: interrupted\n") and "Traceback" not in said, said
    assert not (folder / "summary.json").exists()
    check_resumed(folder, sound(folder)[-1] + 2)


def check_resumed(folder: Path, steps: int, *overrides: str) -> Run:
    """Going on to `steps` steps gives the weights and the rewards of a run that nobody stopped."""
    resumed = train(folder, "one_step_off", f"total_steps={steps}", "resume=auto", *overrides)
    whole = train(folder.with_name(f"{folder.name}-whole"), "one_step_off", f"total_steps={steps}")
    assert resumed.digest == whole.digest
    assert resumed.column("step") == list(range(steps))
    assert resumed.column("reward/mean") == whole.column("reward/mean")
    return resumed


def check_stopped(run: Run) -> int:
    """A stopped run has a checkpoint of exactly where it ended, and a summary of how far it came."""
    done = len(run.metrics)
    assert 1 <= done < 500
    assert run.summary["steps"] == done
    newest = find_checkpoint(run.root / "checkpoints")
    assert newest is not None and newest.name == f"step_{done}"
    assert (run.root / "lora/pytorch_lora_weights.safetensors").exists()
    return done


@pytest.mark.serial
def test_sigterm_ends_in_order_and_resume_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY, "save.every=0")
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    everything = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, exit_codes.RESUMABLE)
    done = check_stopped(Run(folder))
    assert f"stopped by SIGTERM after step {done}; continue with resume=auto" in out
    assert quiet(err), err
    assert ended(everything)
    assert Run(folder).summary["sync"]["transport"] == "object_store", "by which the resumed run's weights came to be"
    check_resumed(folder, done + 2)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("how", ["group", "everything", "twice"])
def test_sigterm_to_everybody_ends_in_order_and_resume_finishes(how: str, tmp_path: Path) -> None:
    """As a shell, `timeout` or Slurm send it: to the process group, or to each process of the job, daemons included."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY, "save.every=0", "rollout.num_workers=2")
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    everything = descendants(process.pid)
    assert len(everything) >= 4
    for _ in range(2 if how == "twice" else 1):
        if how == "everything":
            for each in everything:
                os.kill(each.pid, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.1)
    out, err = finish(process, exit_codes.RESUMABLE)
    done = check_stopped(Run(folder))
    assert f"stopped by SIGTERM after step {done}; continue with resume=auto" in out
    assert quiet(err), err
    assert not [e for e in lines(folder / "events.jsonl") if e["event"] == "fault"], "nobody died of it"
    assert ended(everything)
    check_resumed(folder, done + 2)


@pytest.mark.slow
@pytest.mark.serial
def test_sigterm_before_the_first_step_leaves_a_run_that_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG)
    wait_until(process, lambda: (folder / "logs/trainer-0.log").exists(), "it had a trainer")
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = finish(process, exit_codes.RESUMABLE)
    done = check_stopped(Run(folder))
    assert f"stopped by SIGTERM after step {done}" in out
    check_resumed(folder, done + 2)


@pytest.mark.slow
@pytest.mark.serial
def test_a_stop_that_takes_the_workers_too_is_resumable(tmp_path: Path) -> None:
    """As where the cluster is not ours and its nodes go away together with the run."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY)
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    trainer = next(
        e["pid"] for e in lines(folder / "events.jsonl") if e["event"] == "worker" and "trainer" in e["worker"]
    )
    process.send_signal(signal.SIGTERM)
    os.kill(trainer, signal.SIGKILL)
    out, err = finish(process, exit_codes.RESUMABLE)
    assert "stopped by SIGTERM, which ended workers too (WorkerDied: trainer-0 died" in out
    assert quiet(err), err
    check_resumed(folder, sound(folder)[-1] + 2)


def test_time_limit_ends_in_order_and_resume_finishes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limited = [LONG, "time_limit=2.5", "debug.delays.update=1.0", "debug.delays.constant=true"]
    done = check_stopped(train(tmp_path / "run", "one_step_off", *limited, code=exit_codes.RESUMABLE))
    assert f"stopped by time_limit=2.5 s after step {done}" in capfd.readouterr().out
    check_resumed(tmp_path / "run", done + 2, "rollout.num_workers=2")


@pytest.mark.slow
@pytest.mark.serial
def test_time_limit_of_processes(tmp_path: Path) -> None:
    limited = [LONG, "time_limit=15", "debug.delays.update=1.0", "debug.delays.constant=true"]
    out, err = finish(start(tmp_path / "run", "one_step_off", *limited), exit_codes.RESUMABLE)
    done = check_stopped(Run(tmp_path / "run"))
    assert f"stopped by time_limit=15 s after step {done}; continue with resume=auto" in out
    assert quiet(err), err
    assert sound(tmp_path / "run") == [0, done]
    check_resumed(tmp_path / "run", done + 2)


def test_a_stop_in_the_last_step_is_a_finished_run(tmp_path: Path) -> None:
    slow = ["total_steps=1", "time_limit=0.5", "debug.delays.update=1.0", "debug.delays.constant=true"]
    run = train(tmp_path, "sync", *slow, code=exit_codes.OK)
    assert run.summary["steps"] == run.summary["total_steps"] == 1
