"""Tests of a run whose cluster starts beside the imports of its code, and which then does not come to train."""

import signal
from pathlib import Path

import psutil
import pytest

from async_flowrl.config import exit_codes
from separation.processes import alive, descendants
from tests.integration.runs import finish, start, wait_until


@pytest.mark.serial
def test_a_run_that_is_refused_after_its_cluster_began_to_start_leaves_nothing_behind(tmp_path: Path) -> None:
    """Only torch-free checks come before the start; this one is made when the run is prepared."""
    folder = tmp_path / "run"
    process = start(folder, "one_step_off", "rollout.tickets_per_batch=99")
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    daemons: list[psutil.Process] = descendants(process.pid)
    out, err = finish(process, exit_codes.CONFIG)
    assert out == ""
    assert err.startswith("async_flowrl: rollout.tickets_per_batch=99, but a step has") and err.count("\n") == 1
    assert not [daemon for daemon in daemons if alive(daemon)] and not folder.exists()


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
def test_sigterm_while_the_cluster_starts_ends_its_daemons_too(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "one_step_off")
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    daemons = descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    psutil.wait_procs(daemons, timeout=60)
    assert not [daemon for daemon in daemons if alive(daemon)]
