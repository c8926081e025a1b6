"""The same promises with the workers as processes, and several trainer ranks."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from async_flowrl.policies.lora_file import FILE_NAME
from tests.integration.runs import Run, overtaking, train, train_here_on_ray

pytestmark = pytest.mark.usefixtures("ray_here")
DELAYS = [f"debug.delays.{stage}=0.3" for stage in ("generate", "score", "update", "publish")]


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process, one rank, one worker, nothing in the way."""
    return train(tmp_path_factory.mktemp("threads"), "one_step_off")


def lora(run: Run) -> dict[str, Tensor]:
    return dict(load_file(run.root / "lora" / FILE_NAME))


def test_processes_with_delays_give_the_weights_of_threads(threads: Run, tmp_path: Path) -> None:
    run = overtaking(train_here_on_ray, tmp_path, "one_step_off", *DELAYS)
    pids = {e["worker"]: e["pid"] for e in run.events if e["event"] == "worker"}
    assert len(set(pids.values())) == 4
    assert run.digests == threads.digests
    assert run.sample_log == threads.sample_log


def test_gloo_delivers_what_the_object_store_delivers(threads: Run, tmp_path: Path) -> None:
    run = train_here_on_ray(tmp_path, "one_step_off", "rollout.num_workers=2", "checkpoint_engine.transport=gloo")
    sync = run.summary["sync"]
    assert sync["transport"] == "gloo"
    assert sync["fallbacks"] < sync["publishes"], "a handshake may come too late on a busy machine, not all of them"
    acknowledged = [e for e in run.events if e["event"] == "version" and e["state"] == "acknowledged"]
    assert {e["worker"] for e in acknowledged} == {"rollout-0", "rollout-1"}
    assert run.digests == threads.digests
    assert run.sample_log == threads.sample_log


@pytest.mark.slow
def test_colocated_processes(tmp_path: Path) -> None:
    colocated = train_here_on_ray(tmp_path / "colocated", "sync", "placement=colocated")
    assert colocated.digests == train(tmp_path / "threads", "sync").digests


def test_two_trainer_ranks_make_the_weights_of_one(threads: Run, tmp_path: Path) -> None:
    ranks = overtaking(train_here_on_ray, tmp_path / "ranks", "one_step_off", "trainer.num_workers=2", *DELAYS)
    assert ranks.digests == threads.digests and len(set(ranks.digests)) == 6
    busy = {e["worker"] for e in ranks.events if e["event"] == "span" and e["name"] == "backward"}
    assert busy == {"trainer-0", "trainer-1"}
    moved = max(float(tensor.abs().max()) for name, tensor in lora(ranks).items() if ".lora_B." in name)
    assert moved > 1e-3
