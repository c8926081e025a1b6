"""Tests of a run whose cluster starts beside the imports of its code, and which then does not come to train."""

import signal
import uuid
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from separation.processes import descendants
from tests.integration.runs import finish, start, wait_until
from tests.support.marked import left_after, marked_processes

SECONDS = 20.0
"""A busy machine takes a moment to end what was killed; an agent of Ray that was forgotten lives for a minute."""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Is in the environment of all that the test starts."""
    monkeypatch.setenv("TEST_MARK", value := f"mark-{uuid.uuid4()}")
    return value


def said(err: str) -> list[str]:
    """Its lines, without those on processes that took their time to end on a busy machine."""
    return [line for line in err.splitlines() if "which outlived its cluster" not in line]


@pytest.mark.serial
def test_a_run_that_is_refused_after_its_cluster_began_to_start_leaves_nothing_behind(
    tmp_path: Path, mark: str
) -> None:
    """Only torch-free checks come before the start; this one is made when the run is prepared."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", "rollout.tickets_per_batch=99")
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    out, err = finish(process, exit_codes.CONFIG)
    (sentence,) = said(err)
    assert out == "" and sentence.startswith("async_flowrl: rollout.tickets_per_batch=99, but a step has")
    assert left_after(SECONDS, lambda: marked_processes(mark)) == [] and not folder.exists()


@pytest.mark.serial
def test_a_cluster_that_cannot_start_is_reported_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null/ray")
    folder = tmp_path / "run"
    _, err = finish(start(folder, "one_step_off"), exit_codes.ERROR)
    log = folder / "logs/controller.log"
    sentence = "async_flowrl: the run failed: NotADirectoryError: [Errno 20] Not a directory: '/dev/null/ray'"
    assert err.splitlines()[-1] == f"{sentence} (traceback in {log})"
    assert "Traceback" in log.read_text() and "Traceback" not in err


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
