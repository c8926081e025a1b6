"""Tests of runs whose own cluster starts beside the imports of their code; most of them do not come to train."""

import re
import signal
import subprocess
import sys
import time
import uuid
from datetime import datetime
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from async_flowrl.config import exit_codes
from async_flowrl.main import main
from async_flowrl.observability.run_directory import ATTEMPT
from separation.processes import descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import TINY, Run, finish, lines, start, train, wait_until
from tests.integration.stopped import LONG, check_stopped
from tests.support.marked import left_after, marked_processes

SECONDS = 20.0
"""A busy machine takes a moment to end what was killed; an agent of Ray that was forgotten lives for a minute."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Is in the environment of all that the test starts, except the process from which others are forked: it stays."""
    forkserver.ensure_running()
    monkeypatch.setenv("TEST_MARK", value := f"mark-{uuid.uuid4()}")
    return value


def said(err: str) -> list[str]:
    """Its lines, without those on processes that took their time to end on a busy machine."""
    return [line for line in err.splitlines() if "which outlived its cluster" not in line]


@pytest.mark.serial("runs")
def test_a_run_that_is_refused_after_its_cluster_began_to_start_leaves_nothing_behind(
    tmp_path: Path, mark: str
) -> None:
    """Only torch-free checks come before the start; this one is made when the run is prepared."""
    folder, wrong = tmp_path / "run", "rollout.tickets_per_batch=99"
    process = ForkedRun(folder, "one_step_off", wrong, backend="ray", environment={"TEST_MARK": mark})
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    out, err = process.communicate()
    assert process.poll() == exit_codes.CONFIG, err
    (sentence,) = said(err)
    assert out == "" and sentence.startswith("async_flowrl: rollout.tickets_per_batch=99, but a step has")
    assert left_after(SECONDS, lambda: marked_processes(mark)) == [] and not folder.exists()


@pytest.mark.serial
def test_a_cluster_that_cannot_start_is_reported_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null/ray")
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["main", "--config-name", "one_step_off", *TINY, f"output_dir={folder}"])
    assert main() == exit_codes.ERROR
    err, log = capfd.readouterr().err, folder / "logs/controller.log"
    sentence = "async_flowrl: the run failed: NotADirectoryError: [Errno 20] Not a directory: '/dev/null/ray'"
    assert err.splitlines()[-1] == f"{sentence} (traceback in {log})"
    assert "Traceback" in log.read_text() and "Traceback" not in err


def created(pid: int) -> float:
    """The `time.time()` at which a process was created, to about a hundredth of a second.

    What psutil says rests on the time of the machine's boot, which is a second off on some machines; so it is compared
    with a process that is created now.
    """
    with subprocess.Popen(["sleep", "60"]) as known:
        off = psutil.Process(known.pid).create_time() - time.time()
        known.kill()
    return psutil.Process(pid).create_time() - off


@pytest.mark.serial
def test_processes_of_workers_start_while_a_run_is_prepared_and_end_with_it(tmp_path: Path, mark: str) -> None:
    """Separate pools, ended by SIGTERM; Ray's object store brought the weights to the rollout worker until then."""
    run = Run(tmp_path / "run")
    process = start(run.root, "one_step_off", LONG, "save.every=0")
    try:
        wait_until(process, lambda: len(lines(run.root / "metrics.jsonl")) >= 3, "its third step")
        assert not [line for line in marked_processes(mark) if "ray::IDLE" in line], "each is used"
        attempt = (run.root / "logs/controller.log").read_text().splitlines()[0]
        prepared = datetime.strptime(attempt[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        assert attempt.endswith(ATTEMPT)
        trainer = re.search(r"process (\d+) on", (run.root / "logs/trainer-0.log").read_text())
        assert trainer is not None and created(int(trainer[1])) < prepared
        process.send_signal(signal.SIGTERM)
        finish(process, exit_codes.RESUMABLE)
    finally:
        process.kill()
    done = check_stopped(run)
    assert run.summary["sync"]["transport"] == "object_store"
    assert run.digests == train(tmp_path / "threads", "one_step_off", f"total_steps={done}").digests
    assert left_after(SECONDS, lambda: marked_processes(mark)) == []


@pytest.mark.serial
@pytest.mark.parametrize(
    ("number", "code", "sentence"),
    [
        (signal.SIGTERM, exit_codes.RESUMABLE, "async_flowrl: ended by SIGTERM before the first step"),
        (signal.SIGINT, exit_codes.INTERRUPTED, "async_flowrl: interrupted"),
    ],
)
def test_a_signal_while_the_cluster_starts_ends_all_of_it(
    tmp_path: Path, mark: str, number: signal.Signals, code: int, sentence: str
) -> None:
    folder = tmp_path / "run"
    process = start(folder, "one_step_off")
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    process.send_signal(number)
    _, err = finish(process, code)
    assert said(err) == [sentence]
    assert left_after(SECONDS, lambda: marked_processes(mark)) == []
    assert not folder.exists(), "the run was not prepared yet"
