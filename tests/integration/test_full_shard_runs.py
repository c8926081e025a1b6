"""Tests of runs with tune=full, in which each of two trainer ranks, a process each, has a share of the weights."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from async_flowrl.cli.verify import verify
from tests.integration.forked_ranks import train_with_forked_ranks
from tests.integration.runs import DELAYS, TINY, Run, start, train, train_here_on_ray, wait_until
from tests.integration.whole_weights import Received, check_all_changed_and_delivered, watched_receivers, whole
from tests.support.killed_trainer import Kill, run_killed

SHARDED = (
    "tune=full",
    "trainer.num_workers=2",
    "trainer.shard=full",
    "trainer.micro_batch_size=2",
    "trainer.learning_rate=1e-3",
    "trainer.ema_decay=0.9",
    "trainer.ema_every=1",
    "model.tiny.heads=2",
    "model.tiny.layers=2",
    "save.every=1",
    "save.keep=3",
    "checkpoint_engine.bucket_bytes=65536",
)
DAMAGED = "shards/rank_1.pt"


@pytest.fixture(scope="module")
def watched(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Received]:
    """Three steps, undisturbed, with two workers of each kind as threads, and what the rollout workers received."""
    folder = tmp_path_factory.mktemp("shards") / "run"
    pools = ("rollout.num_workers=2", "reward.num_workers=2")
    with watched_receivers() as received:
        return train_with_forked_ranks(folder, "one_step_off", *SHARDED, *pools, "total_steps=3"), received


@pytest.fixture(scope="module")
def plain(watched: tuple[Run, Received]) -> Run:
    """The same run; `resumed` has one worker of each kind, on Ray."""
    return watched[0]


@pytest.fixture(scope="module")
def resumed(plain: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What a run leaves whose driver is killed after its second step, resumed on Ray; all that may differ does.

    One rank's share of the second checkpoint is damaged, which nobody but that rank reads: the first one is taken.
    """
    folder = tmp_path_factory.mktemp("resumed") / "run"
    shutil.copytree(plain.root, folder)
    for later in ("checkpoints/step_3", "transformer"):
        shutil.rmtree(folder / later)
    share = folder / "checkpoints" / "step_2" / DAMAGED
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    sent = ("checkpoint_engine.bucket_bytes=5000", "checkpoint_engine.transport=gloo")
    other = ("rollout.num_workers=1", "reward.num_workers=1", *sent, *DELAYS)
    return train_here_on_ray(folder, "one_step_off", *SHARDED, *other, "total_steps=3", "resume=auto")


def busy_ranks(events: list[dict[str, Any]]) -> set[str]:
    return {event["worker"] for event in events if event["event"] == "span" and event["name"] == "backward"}


def test_every_parameter_changed_and_the_whole_model_was_delivered(watched: tuple[Run, Received]) -> None:
    plain, received = watched
    check_all_changed_and_delivered(plain, received)
    assert plain.summary["sync"]["transport"] == "object_store"
    assert plain.column("timing/activate")[0] > 0.0, "version 0 was put into the rollout's network"
    assert busy_ranks(plain.events) == {"trainer-0", "trainer-1"}


def test_workers_delays_buckets_and_a_resume_on_ray_change_no_bit(plain: Run, resumed: Run) -> None:
    """Each rank a process on Ray that reads its share of the checkpoint; versions are gathered, and go by gloo."""
    assert [event["step"] for event in resumed.events if event["event"] == "rollback"] == [1]
    said = (resumed.root / "logs" / "controller.log").read_text()
    assert f"step_2: {DAMAGED} does not have the size and digest it was written with; trying an older one" in said
    now = resumed.events[len(plain.events) :]
    assert busy_ranks(now) == {"trainer-0", "trainer-1"}
    pids = {event["worker"]: event["pid"] for event in now if event["event"] == "worker"}
    assert sorted(pids) == ["reward-0", "rollout-0", "trainer-0", "trainer-1"] and len(set(pids.values())) == 4
    both = ({event["worker"] for event in each if event.get("state") == "SCORING"} for each in (plain.events, now))
    assert [*both] == [{"rollout-0", "rollout-1"}, {"rollout-0"}]
    sync = resumed.summary["sync"]
    assert (sync["transport"], sync["corrupt"], sync["fallbacks"]) == ("gloo", 0, 0)
    assert sync["bytes"] >= 3 * sum(tensor.nbytes for tensor in whole(plain).values()), (
        "versions 1 to 3, each all of it"
    )
    assert resumed.digest == plain.digest and resumed.digests[-1] == plain.digests[-1]
    ours, theirs = whole(resumed), whole(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the average, too"
    assert [row for row in verify(resumed.root) if not row[1]] == []


def test_a_resume_with_other_shares_is_refused_by_name(
    plain: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("trainer.num_workers=1", "runtime.backend=local")
    resume = f"resume={plain.root / 'checkpoints' / 'step_3'}"
    train(tmp_path, "one_step_off", "runtime.backend=ray", *SHARDED, "total_steps=3", resume, *other, code=2)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("async_flowrl: "))
    assert "was written by 2 ranks with a share each" in said and "trainer.num_workers=2" in said


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_stream_is_sync(tmp_path: Path) -> None:
    more = ("total_steps=2", "prompts_per_step=4", "ticket_size=2", "rollout.num_workers=2", *DELAYS)
    sync, stream = (train_with_forked_ranks(tmp_path / mode, mode, *SHARDED, *more) for mode in ("sync", "stream"))
    assert sync.digests == stream.digests and len(set(sync.digests)) == 3
    assert sync.sample_log == stream.sample_log and sync.column("staleness/max") == [0, 0]
    ours, theirs = whole(sync), whole(stream)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), "the average, too"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer-1", "rollout-0", "driver"])
def test_a_killed_process(tmp_path: Path, victim: str) -> None:
    settings = (*SHARDED, "total_steps=4", "rollout.num_workers=2", "disturb.update=0.3")
    calm, folder = tmp_path / "calm", tmp_path / "run"
    process = start(calm, "one_step_off", *settings)
    assert process.wait(timeout=300) == 0
    process = start(folder, "one_step_off", *settings)
    wait_until(process, (folder / "checkpoints" / "step_2").exists, "its second checkpoint")
    if victim == "driver":
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process = start(folder, "one_step_off", *settings, "resume=auto")
    else:
        pids = [
            event["pid"] for event in Run(folder).events if event["event"] == "worker" and event["worker"] == victim
        ]
        os.kill(pids[-1], signal.SIGKILL)
    assert process.wait(timeout=300) == 0
    again = Run(folder)
    assert again.digest == Run(calm).digest and again.digests[-1] == Run(calm).digests[-1]
    back = [event["step"] for event in again.events if event["event"] == "rollback"]
    assert bool(back) == (victim != "rollout-0"), "a trainer rank's death goes back to the checkpoint"
    assert [row for row in verify(folder) if not row[1]] == []


@pytest.mark.slow
def test_ranks_killed_in_a_gather(tmp_path: Path) -> None:
    """First the other rank, then the one that gathers; versions are published again, and with the same bits."""
    settings = (*SHARDED, "total_steps=4", "console=quiet")
    calm, folder = tmp_path / "calm", tmp_path / "run"
    assert start(calm, "one_step_off", *settings).wait(timeout=300) == 0
    kills = [Kill(2, 1, "gathering", 0.5), Kill(3, 0, "gathering", 0.5)]
    assert run_killed(kills, folder, *TINY, *settings, seconds=600) == ["2 1 gathering", "3 0 gathering"]
    again = Run(folder)
    assert len([event for event in again.events if event["event"] == "rollback"]) == 2
    assert again.digest == Run(calm).digest and again.digests[-1] == Run(calm).digests[-1]
    assert [row for row in verify(folder) if not row[1]] == []
