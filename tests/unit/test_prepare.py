"""Tests of the checks of `prepare`, before anything is started, for every family of models."""

import asyncio
from pathlib import Path

import pytest

from async_flowrl.cli.doctor import compare_store
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.run.launch import check_stored
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import Prepared, prepare
from separation.resources import StoreTooSmall


def prepared(folder: Path, *overrides: str) -> Prepared:
    return prepare(precheck(compose_config("one_step_off", [f"output_dir={folder / 'run'}", *overrides])))


@pytest.mark.extended
def test_the_dtype_of_the_files_is_written_down(tmp_path: Path) -> None:
    """A resume compares it, and every worker reads it."""
    found = prepared(tmp_path)
    assert found.config.model.dtype == found.model.dtype == found.requests.config.model.dtype == "float32"
    assert prepared(tmp_path, "model.dtype=bfloat16").model.dtype == "bfloat16"


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_ranks_that_share_two_experts_train_the_same_levels(algorithm: str, tmp_path: Path) -> None:
    """FSDP2 would wait for ever for a rank that computes with the other expert."""
    settings = ("model=tiny_wan22", "rollout.frames=5", f"algorithm={algorithm}", "trainer.num_workers=2")
    with pytest.raises(ConfigError, match=r"algorithm\.window_per"):
        prepared(tmp_path, *settings, "trainer.shard=full")
    prepared(tmp_path, *settings, "trainer.shard=full", "algorithm.window_per=step")
    prepared(tmp_path, *settings, "trainer.shard=full", "algorithm.global_std=true", "hand_over=batch")
    prepared(tmp_path, *settings, "trainer.shard=none")


def test_the_store_must_hold_it_when_the_trained_parameters_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is asked again. The state and the weights on their way need room."""
    monkeypatch.setattr("separation.ray_cluster.living_resources", lambda: [{"object_store_memory": 1e8}])
    found = prepared(tmp_path, "trainer.num_workers=2")
    check_stored(found, trained=1_000_000)
    asyncio.run(compare_store(found))  # as the doctor does, by the plan's number of trained parameters
    with pytest.raises(StoreTooSmall, match=r"results and weights lie in the object store, which holds 0\.1 GB"):
        check_stored(found, trained=4_000_000)
    whole = ("tune=full", "trainer.num_workers=2", "trainer.shard=full")
    check_stored(prepared(tmp_path, *whole), trained=4_000_000)
    with pytest.raises(StoreTooSmall, match=r"results and weights lie in the object store"):
        check_stored(prepared(tmp_path, *whole), trained=20_000_000)
    monkeypatch.setattr("separation.ray_cluster.living_resources", lambda: [{"object_store_memory": 1e5}])
    with pytest.raises(StoreTooSmall):
        asyncio.run(compare_store(found))
