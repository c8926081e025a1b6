"""Test of one_step_off on Ray: two rollout workers, two trainer ranks with FSDP2, weights over NCCL, bfloat16."""

from pathlib import Path

import pytest

from tests.pretend_gpu.rehearse import Rehearsal, rehearse

pytestmark = pytest.mark.timeout(400)
WORKERS = ("rollout.num_workers=2", "trainer.num_workers=2", "trainer.micro_batch_size=2", "trainer.shard=full")


@pytest.fixture(scope="module")
def by_object_store(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder = tmp_path_factory.mktemp("object_store") / "run"
    return rehearse(folder, "one_step_off", *WORKERS, "checkpoint_engine.transport=object_store")


@pytest.fixture(scope="module")
def by_nccl(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    folder = tmp_path_factory.mktemp("nccl") / "run"
    return rehearse(folder, "one_step_off", *WORKERS, "checkpoint_engine.transport=nccl")


def test_nccl_delivers_what_the_object_store_delivers(by_nccl: Rehearsal, by_object_store: Rehearsal) -> None:
    by_nccl.flawless()
    by_nccl.delivered("nccl")
    by_object_store.flawless()
    assert by_nccl.digests == by_object_store.digests
    assert len(set(by_nccl.digests)) == 4
    assert by_nccl.digest == by_object_store.digest
    for pool in ("rollout", "trainer"):
        reserved = [line[f"memory/{pool}"] for line in by_nccl.metrics]
        assert 0 < reserved[0] <= reserved[-1] == by_nccl.summary["memory"][pool] < 1


def test_the_base_was_sharded_and_the_weights_went_by_broadcasts(by_nccl: Rehearsal) -> None:
    trainers = [report for report in by_nccl.reports if "aten::_fused_adamw_" in report["operators"]]
    assert len(trainers) == 2
    for report in trainers:
        gathers = [one for one in report["seen"] if (one["kind"], one["text"]) == ("collective", "allgather")]
        assert sum(one["count"] for one in gathers) > 10 * by_nccl.summary["steps"]
    assert any(line.split(" x ")[1].startswith("broadcast @") for line in by_nccl.seen("collective"))


def test_a_delivery_waits_for_nobody_elses_work(by_nccl: Rehearsal) -> None:
    """What the host waits for in a lane is not behind what another lane has enqueued."""
    assert [line for line in by_nccl.seen("behind another thread") if "checkpoint_engine/" in line] == []


@pytest.mark.parametrize("notices", ["silent", pytest.param("error", marks=pytest.mark.slow)])
def test_a_receiver_killed_in_the_middle_of_a_bucket(by_object_store: Rehearsal, tmp_path: Path, notices: str) -> None:
    """NCCL never tells of a dead peer on its own host ("silent"), and does of one on another; the weights are equal."""
    death = tmp_path / "death"
    environment = {"PRETEND_NCCL_DIE": str(death), "PRETEND_NCCL_PEER": notices}
    run = rehearse(
        tmp_path / "run", "one_step_off", *WORKERS, "checkpoint_engine.transport=nccl", environment=environment
    )
    assert death.exists(), "nobody was killed"
    assert any(event["worker"].startswith("rollout") for event in run.events if event["event"] == "fault")
    run.flawless()
    assert run.digests == by_object_store.digests
