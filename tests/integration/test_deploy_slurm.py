"""Tests of the Slurm script on Debian's Slurm and two pretended nodes: stopped, queued again, and resumed."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl.main import main
from tests.nodes import pretended_nodes
from tests.nodes.pretended_nodes import Nodes
from tests.support import slurm as slurm_daemons
from tests.support.published import use_published_models
from tests.support.slurm import Slurm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "deploy" / "slurm" / "train.sh"
SECONDS = 900.0
"""Until a condition holds that is polled; two starts of Ray on a busy machine take minutes."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED")


def test_what_it_trains_by_itself_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words where it is given none, as far as the model's own configuration."""
    (words,) = re.findall(r"words=\((--config-name .*?)\)", SCRIPT.read_text(), flags=re.DOTALL)
    use_published_models(tmp_path / "hub", monkeypatch)
    monkeypatch.chdir(tmp_path)
    more = ["runtime.address=10.0.0.1:6379", "resume=auto", "dry_run=true"]
    monkeypatch.setattr("sys.argv", ["async_flowrl.main", *shlex.split(words), *more])
    assert main() == 0


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(3000)
def test_a_job_is_stopped_requeued_and_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the batch script, as `--signal=B:TERM@600` sends it: checkpoint, 75, the queue, and the rest."""
    for obstacle in (pretended_nodes.obstacle(), slurm_daemons.obstacle()):
        if obstacle is not None:
            pytest.skip(obstacle)
    run, log = tmp_path / "run", tmp_path / "job.log"
    words = ["--config-name", "one_step_off", "total_steps=6", "save.every=2"]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "RAY_OPTIONS": "--num-cpus=4 --object-store-memory=100000000",
    }
    with Nodes(tmp_path / "nodes", [{}, {}]) as nodes, Slurm(tmp_path / "slurm", nodes.nodes) as slurm:
        batch = ["--parsable", "--nodes=2", "--gpus-per-node=0", f"--output={log}", f"--chdir={tmp_path}"]
        job = slurm.run("sbatch", *batch, str(SCRIPT), *words, f"output_dir={run}", **environment).strip()
        wait(lambda: steps(run) >= 2 or state(slurm, job) in ENDED, log)
        assert state(slurm, job) == "RUNNING", log.read_text()
        assert slurm.job(job)["Restarts"] == "0"
        slurm.run("scancel", "--signal=TERM", "--batch", job)
        wait(lambda: slurm.job(job)["Restarts"] == "1" or state(slurm, job) in ENDED, log)
        assert "stopped by SIGTERM after step " in log.read_text()
        wait(lambda: state(slurm, job) in ("PENDING", *ENDED), log)
        assert not (run / "lora").exists() or steps(run) < 6, "it was stopped before its end"
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm waits two minutes by itself
        wait(lambda: state(slurm, job) in ENDED, log)
        assert (state(slurm, job), slurm.job(job)["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    assert log.read_text().count("this configuration can start here") == 2
    assert "has 2 nodes" in log.read_text()
    assert digest(run) == digest(alone(tmp_path / "alone", words)), "as the run that nobody stopped"


def steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum("timing/step" in line for line in lines)


def state(slurm: Slurm, job: str) -> str:
    return slurm.job(job)["JobState"]


def wait(condition: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, log.read_text() if log.exists() else "the job has said nothing"
        time.sleep(2)


def alone(folder: Path, words: list[str]) -> Path:
    """The same training in one process."""
    command = [sys.executable, "-m", "async_flowrl.main", *words, "runtime.backend=local", f"output_dir={folder}"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    return folder


def digest(run: Path) -> str:
    return str(json.loads((run / "summary.json").read_text())["weights_digest"])
