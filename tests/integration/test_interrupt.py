"""Tests of an early end by Ctrl-C, SIGTERM or time_limit: a resumed run has the weights of an undisturbed one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.run.stopping import ASKED
from async_flowrl.training.checkpoint import verify_checkpoint
from separation.processes import descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import Run, finish, lines, start, train, wait_until
from tests.integration.stopped import HALVES, LONG, SLOWLY, SOON, StoppedRun, check_stopped, ended, quiet


def sound(folder: Path) -> list[int]:
    """Steps of the checkpoints there; every one of them must load."""
    found = [path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_")]
    for path in found:
        verify_checkpoint(path)
    return sorted(int(path.name.removeprefix("step_")) for path in found)


def test_sigterm_just_before_a_run_begins_is_answered_by_one_line() -> None:
    program = (
        "import os, signal\nfrom async_flowrl.run.stopping import sigterm_ends\nasync def train(): ...\n"
        "def run(begun): os.kill(os.getpid(), signal.SIGTERM)\nwith sigterm_ends(): run(train())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == exit_codes.RESUMABLE and len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_everything(tmp_path: Path, twice: bool) -> None:
    """Slow. While a run trains, the first ends it in order, to the whole process group as a terminal sends it; a second
    one ends it at once. Signals while a cluster starts: test_start.py. `make test` has SIGTERM beside busy pools of
    processes (test_separation_processes.py) and in a run of threads (below)."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY)
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    everything = descendants(process.pid)
    assert len(everything) >= 3
    began = time.monotonic()
    for _ in range(2 if twice else 1):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
    out, err = finish(process, exit_codes.INTERRUPTED)
    assert time.monotonic() - began < SOON
    told = [ASKED, "interrupted"] if twice else [ASKED]
    assert quiet("".join(line for line in err.splitlines(True) if not any(each in line for each in told))), err
    assert all(each in err for each in told) and "Traceback" not in out
    assert ended(everything), "nothing may be left running"
    assert (folder / "summary.json").exists() != twice
    assert sound(folder)
    if not twice:
        assert sound(folder)[-1] == check_stopped(Run(folder))


@pytest.mark.serial("runs")
def test_ctrl_c_and_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = ForkedRun(folder, "one_step_off", LONG, *SLOWLY[1:])
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.poll() == exit_codes.INTERRUPTED, err
    assert err == ASKED and "Traceback" not in out, err
    done = check_stopped(Run(folder))
    assert f"stopped by Ctrl-C after step {done}; continue with resume=auto" in out and sound(folder) == [0, done]
    check_resumed(folder, done + 2)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = ForkedRun(folder, "one_step_off", LONG, "disturb.generate=2", "disturb.constant=true")
    wait_until(process, lambda: any(e["event"] == "ticket" for e in lines(folder / "events.jsonl")), "its first ticket")
    process.send_signal(signal.SIGINT)
    wait_until(process, lambda: ASKED in process.said_so_far(), "its answer")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.poll() == exit_codes.INTERRUPTED and err == ASKED + "async_flowrl: interrupted\n", err
    assert not (folder / "summary.json").exists()


def check_resumed(folder: Path, steps: int, *overrides: str, both: tuple[str, ...] = ()) -> Run:
    """Going on to `steps` steps gives the weights and the rewards of a run that nobody stopped."""
    resumed = train(folder, "one_step_off", f"total_steps={steps}", "resume=auto", *both, *overrides)
    whole = train(folder.with_name(f"{folder.name}-whole"), "one_step_off", f"total_steps={steps}", *both)
    assert resumed.digest == whole.digest
    assert resumed.column("step") == list(range(steps))
    assert resumed.column("reward/mean") == whole.column("reward/mean")
    return resumed


def test_sigterm_ends_in_order_and_resume_finishes(tmp_path: Path, stopped_run: StoppedRun) -> None:
    """Two processes on Ray that sample and train. SIGTERM for separate pools, and for each process of a job, is in
    the slow tier."""
    assert stopped_run.code == exit_codes.RESUMABLE, stopped_run.err
    done = check_stopped(stopped_run.run)
    assert f"stopped by SIGTERM after step {done}; continue with resume=auto" in stopped_run.out
    assert quiet(stopped_run.err), stopped_run.err
    assert stopped_run.gone, "nothing may be left running"
    shutil.copytree(stopped_run.run.root, tmp_path / "run")
    check_resumed(tmp_path / "run", done + 2, both=(HALVES,))


@pytest.mark.slow
@pytest.mark.serial
def test_sigterm_to_everybody_ends_in_order_and_resume_finishes(tmp_path: Path) -> None:
    """As Slurm sends it to each process, daemons included, and then once more while the pools end."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", LONG, *SLOWLY, "save.every=0", "rollout.num_workers=2")
    wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
    everything = descendants(process.pid)
    assert len(everything) >= 4
    for each in (*everything, process):
        each.send_signal(signal.SIGTERM)
    wait_until(process, (folder / "summary.json").exists, "its summary")
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, exit_codes.RESUMABLE)
    done = check_stopped(Run(folder))
    assert f"stopped by SIGTERM after step {done}; continue with resume=auto" in out
    assert quiet(err), err
    assert not [e for e in lines(folder / "events.jsonl") if e["event"] == "fault"], "nobody died of it"
    assert ended(everything)
    assert Run(folder).summary["sync"]["transport"] == "object_store", "by which the resumed run's weights came to be"
    check_resumed(folder, done + 2)


@pytest.mark.extended
def test_time_limit_ends_in_order_and_resume_finishes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limited = [LONG, "time_limit=2.5", "disturb.update=1.0", "disturb.constant=true"]
    done = check_stopped(train(tmp_path / "run", "one_step_off", *limited, code=exit_codes.RESUMABLE))
    assert f"stopped by time_limit=2.5 s after step {done}" in capsys.readouterr().out
    check_resumed(tmp_path / "run", done + 2, "rollout.num_workers=2")


def test_a_stop_in_the_last_step_is_a_finished_run(tmp_path: Path) -> None:
    slow = ["total_steps=1", "time_limit=0.5", "disturb.update=1.0", "disturb.constant=true"]
    run = train(tmp_path, "sync", *slow, code=exit_codes.OK)
    assert run.summary["steps"] == run.summary["total_steps"] == 1
