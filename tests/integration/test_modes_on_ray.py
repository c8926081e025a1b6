"""Tests of the modes with processes on Ray, several trainer ranks and gloo; each run costs ten times one of threads."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from async_flowrl.policies.lora_file import FILE_NAME
from tests.integration.runs import DELAYS, TRAINED, Run, overtaking, train, train_here_on_ray

pytestmark = pytest.mark.serial("runs")
PATIENT = ("checkpoint_engine.ready_seconds=300", "checkpoint_engine.setup_seconds=300", "deadlines.publish=900")
"""On a busy machine a handshake takes longer than the 10 seconds after which a version goes another way."""


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, one rank, one worker, nothing in the way."""
    return train(tmp_path_factory.mktemp("threads"), "one_step_off")


def lora(run: Run) -> dict[str, Tensor]:
    return dict(load_file(run.root / "lora" / FILE_NAME))


def test_processes_with_delays_give_the_weights_of_threads(full_run: Run, tmp_path: Path) -> None:
    """Each worker a process, evaluations and monitors beside the training, against none of it."""
    plain = train(tmp_path, "one_step_off", *TRAINED)
    pids = {e["worker"]: e["pid"] for e in full_run.events if e["event"] == "worker"}
    assert len(set(pids.values())) == 4
    assert full_run.digests == plain.digests
    assert full_run.sample_log == plain.sample_log


@pytest.fixture(scope="module")
def by_gloo(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two trainer ranks, two rollout workers with delays, weights sent by gloo."""
    settings = ("trainer.num_workers=2", "checkpoint_engine.transport=gloo", *PATIENT, *DELAYS)
    return overtaking(train_here_on_ray, tmp_path_factory.mktemp("gloo"), "one_step_off", *settings)


def test_gloo_delivers_what_the_object_store_delivers(threads: Run, by_gloo: Run) -> None:
    sync = by_gloo.summary["sync"]
    assert (sync["transport"], sync["publishes"], sync["fallbacks"]) == ("gloo", 6, 0)
    acknowledged = [e for e in by_gloo.events if e["event"] == "version" and e["state"] == "acknowledged"]
    assert {(e["worker"], e["version"]) for e in acknowledged} >= {
        (f"rollout-{index}", version) for index in (0, 1) for version in range(5)
    }
    assert by_gloo.digests == threads.digests
    assert by_gloo.sample_log == threads.sample_log


def test_two_trainer_ranks_make_the_weights_of_one(threads: Run, by_gloo: Run) -> None:
    assert by_gloo.digests == threads.digests and len(set(by_gloo.digests)) == 6
    busy = {e["worker"] for e in by_gloo.events if e["event"] == "span" and e["name"] == "backward"}
    assert busy == {"trainer-0", "trainer-1"}
    moved = max(float(tensor.abs().max()) for name, tensor in lora(by_gloo).items() if ".lora_B." in name)
    assert moved > 1e-3
