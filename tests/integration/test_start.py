"""Tests of runs whose own cluster starts beside the imports of their code; most of them do not come to train."""

import signal
import sys
import uuid
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.main import main
from separation.processes import descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import TINY, finish, start, wait_until
from tests.integration.watched import SECONDS, WatchedRun
from tests.support.marked import left_after, marked_processes


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Is in the environment of all that the test starts."""
    monkeypatch.setenv("TEST_MARK", value := f"mark-{uuid.uuid4()}")
    return value


def said(err: str) -> list[str]:
    """Its lines, without those on processes that took their time to end on a busy machine."""
    return [line for line in err.splitlines() if "which outlived its cluster" not in line]


@pytest.mark.serial("runs")
def test_a_run_that_is_refused_after_its_cluster_began_to_start_leaves_nothing_behind(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torch-free checks come before the start; this one is made when the run is prepared."""
    monkeypatch.delenv("TEST_MARK")  # The process from which the run is forked stays.
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


def test_processes_of_workers_start_while_a_run_is_prepared_and_end_with_it(full_run: WatchedRun) -> None:
    """Ray starts the first of them ahead, and no more than are used."""
    assert sorted(full_run.created) == ["reward-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    assert min(full_run.created.values()) < full_run.prepared
    assert full_run.started == len(full_run.created) and full_run.left == []


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
