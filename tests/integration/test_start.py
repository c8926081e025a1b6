"""Tests of the start of a run's own cluster; most of these runs do not come to train."""

import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from async_flowrl.config import exit_codes
from async_flowrl.main import main
from separation.processes import descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import LIMIT, ROOT, TINY, lines, wait_until
from tests.integration.watched import SECONDS, WatchedRun
from tests.support.forked import python, share
from tests.support.marked import left_after, marked_processes


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Is in the environment of all that the test starts, but not of what forks for all tests."""
    share()
    monkeypatch.setenv("TEST_MARK", value := f"mark-{uuid.uuid4()}")
    return value


@pytest.mark.serial
def test_a_cluster_that_cannot_start_is_reported_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/dev/null/ray")
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["main", "--config-name", "one_step_off", *TINY, f"output_dir={folder}"])
    assert main() == exit_codes.ERROR
    err, log = capsys.readouterr().err, folder / "logs/controller.log"
    sentence = "async_flowrl: the run failed: NotADirectoryError: [Errno 20] Not a directory: '/dev/null/ray'"
    assert err.splitlines()[-1] == f"{sentence} (traceback in {log})"
    assert "Traceback" in log.read_text() and "Traceback" not in err


def test_every_worker_is_a_process_and_ends_with_its_run(full_run: WatchedRun) -> None:
    assert sorted(full_run.created) == ["reward-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    assert full_run.left == []


@pytest.mark.serial
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, exit_codes.RESUMABLE),
        pytest.param(signal.SIGINT, exit_codes.INTERRUPTED, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_cluster_starts_ends_all_of_it(
    tmp_path: Path, mark: str, number: signal.Signals, code: int
) -> None:
    process = ForkedRun(tmp_path / "run", "one_step_off", backend="ray")
    wait_until(process, lambda: descendants(process.pid), "the first daemon of its cluster")
    process.send_signal(number)
    _, err = process.communicate()
    assert process.poll() == code, err
    assert not lines(tmp_path / "run" / "metrics.jsonl"), "it ends at once, not after a step"
    assert left_after(SECONDS, lambda: marked_processes(mark)) == []


PREPARING = """
import sys
from async_flowrl.config.compose import compose_config
from async_flowrl.main import train
from async_flowrl.run import job
job.prepare = lambda config, **_: (print("prepares", flush=True), sys.stdin.read())
train(compose_config("one_step_off", [f"output_dir={sys.argv[1]}"]), dict)
"""


def test_a_sigterm_while_the_run_is_prepared_is_resumable_and_leaves_no_folder(tmp_path: Path) -> None:
    command = [*python(), "-c", PREPARING, str(tmp_path / "run")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"prepares\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == exit_codes.RESUMABLE
    assert not (tmp_path / "run").exists()
