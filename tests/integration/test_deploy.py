"""Tests of the Slurm script on Debian's Slurm and two pretended nodes: stopped, queued again, and resumed."""

import io
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_flowrl.main import main
from tests.integration.runs import Run, exit_code
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


@pytest.mark.extended
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
    alone = [sys.executable, "-m", "async_flowrl.main", *words, "runtime.backend=local", f"output_dir={tmp_path}/alone"]
    subprocess.run(alone, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert Run(run).digest == Run(tmp_path / "alone").digest, "as the run that nobody stopped"


def steps(run: Path) -> int:
    return sum("timing/step" in line for line in Run(run).metrics)


def state(slurm: Slurm, job: str) -> str:
    return slurm.job(job)["JobState"]


def wait(condition: Callable[[], bool], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, log.read_text() if log.exists() else "the job has said nothing"
        time.sleep(2)


FOLDER = ROOT / "examples" / "deploy" / "kuberay"
KUBERNETES = "1.30"
KINDS = ("rayjob.yaml", "raycluster.yaml")


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


def cluster_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = read(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def templates(name: str) -> Iterator[dict[str, Any]]:
    cluster = cluster_of(name)
    yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))
    if (submitter := read(name)["spec"].get("submitterPodTemplate")) is not None:
        yield submitter


def check(document: dict[str, Any]) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    kubernetes.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", KINDS)
def test_every_pod_is_one_that_kubernetes_takes(name: str) -> None:
    pods = list(templates(name))
    assert len(pods) >= 2
    for template in pods:
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template})
    check(read("volume.yaml"))


@pytest.mark.parametrize(("name", "pods"), [("rayjob.yaml", 2), ("raycluster.yaml", 8)])
def test_ray_reads_the_seats_of_the_cluster(name: str, pods: int, caplog: pytest.LogCaptureFixture) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    caplog.set_level(logging.WARNING)
    made = _derive_autoscaling_config_from_ray_cr({"metadata": read(name)["metadata"], "spec": cluster_of(name)})
    types = made["available_node_types"]
    assert types["headgroup"]["resources"]["GPU"] == 0, "the driver's node holds no workers that need GPUs"
    assert (types["gpus"]["resources"]["GPU"], types["gpus"]["max_workers"]) == (8, pods)
    assert made["max_workers"] == pods and not caplog.records
    assert "enableInTreeAutoscaling" not in cluster_of(name), "a run that does not fit is refused at once"


def test_the_command_of_the_job_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the model's own configuration; its seats are those of the pods, and its files go to the volume."""
    from async_flowrl import __main__ as verbs

    job = read("rayjob.yaml")["spec"]
    program, *words = shlex.split(job["entrypoint"])
    assert program == "async-flowrl" and "resume=auto" in words and job["backoffLimit"] > 0
    assert any(word.startswith("output_dir=/data/") for word in words)
    use_published_models(tmp_path / "hub", monkeypatch)
    monkeypatch.chdir(tmp_path)
    changed = [f"output_dir={tmp_path}/run" if word.startswith("output_dir=") else word for word in words]
    monkeypatch.setattr("sys.argv", ["async-flowrl", *changed, "dry_run=true"])
    out = io.StringIO()
    with redirect_stdout(out):
        code = exit_code(verbs.main)
    assert code == 0 and "Qwen/Qwen-Image " in out.getvalue()


DOCKERFILE = ROOT / "examples" / "deploy" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
WORDS = "total_steps=1 runtime.backend=local group_size=4 trainer.micro_batch_size=4 output_dir=runs/one"
TRAIN = f"async-flowrl train --config-name sync {WORDS}"


def instructions() -> list[list[str]]:
    """[kind, text] of each, its continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_what_is_copied_is_there_and_reaches_the_build() -> None:
    let_through = {line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    copied = {word for kind, text in instructions() if kind == "COPY" for word in shlex.split(text)[:-1]}
    assert copied == let_through and all((ROOT / name).exists() for name in copied)
    assert {"async_flowrl", "separation", "checkpoint_engine", "configs"} <= copied


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_its_steps_make_an_environment_that_trains(tmp_path: Path) -> None:
    """Every step in order, on this machine's Python instead of the image's, in a folder instead of a container, without
    the system's packages."""
    place, venv = tmp_path / "build", tmp_path / "venv"
    place.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= dict(text.split("=", 1) for kind, text in instructions() if kind == "ARG" and "=" in text)
    environment |= {"VIRTUAL_ENV": str(venv), "ASYNC_FLOWRL_CACHE": str(tmp_path / "models")}
    environment["PATH"] = f"{venv}/bin:{Path(sys.base_prefix) / 'bin'}:{os.environ['PATH']}"
    for kind, text in instructions():
        if kind == "COPY":
            *names, target = shlex.split(text)
            for name in names:
                copy(ROOT / name, place / target / (name if target == "./" else ""))
        elif kind == "RUN" and not text.startswith("apt-get"):
            execute(text, place, environment)
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    execute(TRAIN, elsewhere, environment)
    assert (elsewhere / "runs" / "one" / "summary.json").exists()
    command = [str(venv / "bin" / "python"), "-c", "import async_flowrl; print(async_flowrl.__file__)"]
    where = subprocess.run(command, check=True, capture_output=True, text=True, cwd=elsewhere, env=environment).stdout
    assert str(venv) in where, "the installed package, not the checkout"


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def execute(text: str, folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(["sh", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
