"""Tests of a run with processes on Ray, several trainer ranks and gloo; such a run costs ten times one of threads."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from async_flowrl.policies.lora_file import FILE_NAME
from tests.integration.runs import TRAINED, Run, train, train_here_on_ray

pytestmark = pytest.mark.serial("runs")


@pytest.fixture(scope="session")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, one rank, one worker, the object store, no evaluations or monitors, nothing in the way."""
    return train(tmp_path_factory.mktemp("threads"), "one_step_off", *TRAINED)


def test_processes_with_delays_give_the_weights_of_threads(full_run: Run, threads: Run) -> None:
    """Each worker a process, evaluations and monitors beside the training, against none of it."""
    pids = {e["worker"]: e["pid"] for e in full_run.events if e["event"] == "worker"}
    assert sorted(pids) == ["reward-0", "rollout-0", "rollout-1", "trainer-0", "trainer-1"]
    assert len(set(pids.values())) == 5
    assert full_run.digests == threads.digests and len(set(full_run.digests)) == 7
    assert full_run.sample_log == threads.sample_log


def test_gloo_delivers_what_the_object_store_delivers(full_run: Run, threads: Run) -> None:
    """No broadcast fails. On a busy machine gloo is not used for a version that is published while an evaluation's is
    still being delivered; the first version of a run has none before it."""
    sync = full_run.summary["sync"]
    assert (sync["transport"], sync["publishes"], sync["fallbacks"]) == ("gloo", 7, 0)
    log = (full_run.root / "logs/controller.log").read_text()
    assert log.count(" goes without gloo: busy with an earlier delivery: ") == sync["member_busy"] < sync["publishes"]
    assert threads.summary["sync"]["transport"] == "object_store"
    acknowledged = [e for e in full_run.events if e["event"] == "version" and e["state"] == "acknowledged"]
    assert {(e["worker"], e["version"]) for e in acknowledged} >= {
        (f"rollout-{index}", version) for index in (0, 1) for version in range(6)
    }
    assert full_run.digests == threads.digests


@pytest.mark.usefixtures("ray_here")
@pytest.mark.extended
def test_the_object_store_delivers_from_process_to_process(tmp_path: Path, threads: Run) -> None:
    """One worker of each kind, each a process; threads only hand the weights over."""
    run = train_here_on_ray(tmp_path, "one_step_off", *TRAINED, "total_steps=3")
    assert len({event["pid"] for event in run.events if event["event"] == "worker"}) == 3
    sync = run.summary["sync"]
    assert (sync["transport"], sync["publishes"], sync["corrupt"]) == ("object_store", 4, 0)
    assert run.digests == threads.digests[:4]


def test_two_trainer_ranks_make_the_weights_of_one(full_run: Run, threads: Run) -> None:
    busy = {e["worker"] for e in full_run.events if e["event"] == "span" and e["name"] == "backward"}
    assert busy == {"trainer-0", "trainer-1"}
    assert full_run.digest == threads.digest
    tensors = load_file(full_run.root / "lora" / FILE_NAME)
    moved = max(float(tensor.abs().max()) for name, tensor in tensors.items() if ".lora_B." in name)
    assert moved > 1e-3
