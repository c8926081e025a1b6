"""Tests of the files for KubeRay: Kubernetes accepts the pods, Ray reads their seats, the job's command composes."""

import io
import logging
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.published import use_published_models

kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")

ROOT = Path(__file__).parents[2]
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
        try:
            code = verbs.main()
        except SystemExit as end:
            code = int(end.code or 0)
    assert code == 0 and "Qwen/Qwen-Image " in out.getvalue()
