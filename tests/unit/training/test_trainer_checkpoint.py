"""Tests of checkpoints: complete or absent, and a resumed run has the bits of the undisturbed one."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_flowrl.config.schema import Config
from async_flowrl.controller.resume import deciding, differences, numerics
from async_flowrl.training import checkpoint as store
from async_flowrl.training.checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_step,
    find_checkpoint,
    read_checkpoint,
    read_controller,
    write_checkpoint,
)
from async_flowrl.training.snapshots import Snapshots
from tests.support import trainer_rig as rig


def small(value: float = 1.0) -> Checkpoint:
    tensors = {"weights": {"b": torch.full((3,), value), "a": torch.arange(4.0).view(2, 2)}, "optimizer": {}}
    return Checkpoint(tensors, {"version": 1}, {"digests": {"0": "abc"}})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, small(), keep=2)
    found = read_checkpoint(path)
    assert path.name == "step_1" and checkpoint_step(path) == 1
    assert torch.equal(found.tensors["weights"]["a"], torch.arange(4.0).view(2, 2)) and found.tensors["optimizer"] == {}
    assert found.trainer == {"version": 1} and read_controller(path) == {"digests": {"0": "abc"}}
    assert (tmp_path / "latest").read_text() == "step_1\n"
    assert not list(tmp_path.glob(".*"))


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    one, other = (write_checkpoint(tmp_path / name, 1, small(), keep=1) for name in "ab")
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (0, 2, 4, 10):
        write_checkpoint(tmp_path, step, small(), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_4", "step_10", "latest"}
    write_checkpoint(tmp_path, 5, small(2.0), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_4", "step_5", "latest"}, "step 10 is of an abandoned history"
    write_checkpoint(tmp_path, 5, small(3.0), keep=2)
    newest = find_checkpoint(tmp_path)
    assert newest is not None and float(read_checkpoint(newest).tensors["weights"]["b"][0]) == 3.0


def test_a_writer_that_ends_while_it_replaces_a_checkpoint_leaves_the_one_it_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its two renames, with keep=1, so that there is no older one to go back to."""
    write_checkpoint(tmp_path, 5, small(2.0), keep=1)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if target.name == "step_5":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(tmp_path, 5, small(3.0), keep=1)
    left = find_checkpoint(tmp_path)
    assert left is not None and checkpoint_step(left) == 5
    assert float(read_checkpoint(left).tensors["weights"]["b"][0]) == 2.0
    write_checkpoint(tmp_path, 5, small(4.0), keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step_5", "latest"}
    newest = find_checkpoint(tmp_path)
    assert newest is not None and float(read_checkpoint(newest).tensors["weights"]["b"][0]) == 4.0


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no_manifest", "controller"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, 1, small(), keep=3)
    newest = write_checkpoint(tmp_path, 2, small(), keep=3)
    weights = newest / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    if damage == "flip":
        weights.write_bytes(data)
    elif damage == "truncate":
        weights.write_bytes(data[:-4])
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        text = (newest / "manifest.json").read_text()
        (newest / "manifest.json").write_text(text[: len(text) // 2])
    elif damage == "no_manifest":
        (newest / "manifest.json").unlink()
    else:
        (newest / "controller.json").write_text(json.dumps({"digests": {"0": "abd"}}))
    with pytest.raises(DamagedCheckpoint, match="step_2"):
        read_checkpoint(newest)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path) == tmp_path / "step_1"
    assert "step_2" in caplog.text and "trying an older one" in caplog.text


def test_a_manifest_that_was_edited_is_damage(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, small(), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["controller.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("call", range(1, 12))
def test_a_crash_at_any_moment_leaves_a_sound_checkpoint(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fsync and rename in turn is the last thing that happens."""
    write_checkpoint(tmp_path, 1, small(1.0), keep=2)
    left = call

    def counted(function: object) -> object:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(Path, "replace", counted(Path.replace))
        try:
            write_checkpoint(tmp_path, 2, small(2.0), keep=2)
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("the write took fewer steps than this test expects")
    found = find_checkpoint(tmp_path)
    assert found is not None
    assert float(read_checkpoint(found).tensors["weights"]["b"][0]) == checkpoint_step(found)
    write_checkpoint(tmp_path, 3, small(3.0), keep=1)
    assert {p.name for p in tmp_path.iterdir()} == {"step_3", "latest"}, "what the crash left is cleared away"


def test_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "nowhere") is None and find_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match="must be named step_N"):
        checkpoint_step(tmp_path)


def test_resuming_goes_on_bit_for_bit(tmp_path: Path, sampler: rig.Sampler) -> None:
    config = rig.tiny_config(ema_decay=0.9, ema_every=1)
    config.algorithm.correction = "mask"
    batches = [[sampler.group(step, group) for group in (0, 1)] for step in range(3)]
    stale = [(replace(meta, version=1, age=1), tickets) for meta, tickets in batches[2]]
    whole = rig.trainer(config)
    for step in range(2):
        rig.update(whole, step, batches[step])
    assert whole.snapshot() == 2
    path = whole.save(whole.snapshot(), str(tmp_path), {"published": {"2": "x"}})
    rig.update(whole, 2, stale)
    resumed = rig.trainer(config)
    assert resumed.restore(path) == 2
    assert sorted(resumed.versions.retained) == [1, 2]
    stats = rig.update(resumed, 2, stale)
    assert stats.metrics["behaviour_divergence"] > 0
    assert resumed.parameters.fingerprint() == whole.parameters.fingerprint()
    assert rig.equal(rig.weights(resumed, average=True), rig.weights(whole, average=True))
    forgetful = rig.trainer(config)
    forgetful.restore(path)
    forgetful.optimizer.load({}, 0)
    rig.update(forgetful, 2, stale)
    assert forgetful.parameters.fingerprint() != whole.parameters.fingerprint(), (
        "Adam's moments matter, so they are in the checkpoint"
    )


def test_the_hub_revision_is_recorded_and_must_be_the_same(tmp_path: Path) -> None:
    first, second = rig.trainer(rig.tiny_config()), rig.trainer(rig.tiny_config())
    first._state = replace(first._state, model=replace(first.model, revision="abc"))
    first.snapshots = Snapshots(first._state, first.device)
    path = first.save(first.snapshot(), str(tmp_path), {})
    assert read_checkpoint(Path(path)).trainer["model"] == {"path": "tiny", "revision": "abc"}
    second._state = replace(second._state, model=replace(second.model, revision="def"))
    with pytest.raises(ValueError, match=r"trained on revision abc of .*, this run has def: set model\.revision=abc"):
        second.restore(path)
    second._state = replace(second._state, model=first._state.model)
    assert second.restore(path) == 0


def test_a_snapshot_is_not_touched_by_the_next_update(tmp_path: Path, sampler: rig.Sampler) -> None:
    worker = rig.trainer(rig.tiny_config())
    before = worker.parameters.fingerprint()
    version = worker.snapshot()
    rig.update(worker, 0, [sampler.group(0, 0)])
    path = worker.save(version, str(tmp_path), {})
    assert path.endswith("step_0")
    fresh = rig.trainer(rig.tiny_config())
    rig.update(fresh, 0, [sampler.group(0, 0)])
    assert fresh.restore(path) == 0 and fresh.parameters.fingerprint() == before
    with pytest.raises(KeyError):
        worker.save(7, str(tmp_path), {})


def test_a_checkpoint_of_another_adapter_is_refused(tmp_path: Path) -> None:
    worker = rig.trainer(rig.tiny_config())
    path = worker.save(worker.snapshot(), str(tmp_path), {})
    other = rig.tiny_config()
    other.lora.rank = 2
    with pytest.raises(ValueError, match=r"weights: tensor transformer_blocks\.0\..* is \[4, "):
        rig.trainer(other).restore(path)
    other = rig.tiny_config()
    other.lora.targets = ["attn.to_q"]
    with pytest.raises(ValueError, match="trained other tensors"):
        rig.trainer(other).restore(path)


def change(config: Config, key: str, value: object) -> Config:
    *parents, last = key.split(".")
    section: object = config
    for parent in parents:
        section = getattr(section, parent)
    assert getattr(section, last) != value
    setattr(section, last, value)
    return config


FREE = {
    "name": "other",
    "output_dir": "/elsewhere",
    "rollout.num_workers": 5,
    "reward.num_workers": 5,
    "checkpoint_engine.transport": "gloo",
    "monitor.wandb": True,
    "deadlines.update": 1.0,
    "resume": "auto",
    "total_steps": 7,
    "trainer.num_workers": 2,
}
DECIDING = {
    "seed": 1,
    "max_staleness": 3,
    "group_size": 8,
    "lora.rank": 2,
    "algorithm.clip_range": 0.5,
    "trainer.learning_rate": 1.0,
    "trainer.updates_per_batch": 2,
    "data.train": "other.txt",
}


@pytest.mark.parametrize("key", FREE)
def test_the_configuration_hash_leaves_out_what_changes_no_weight(key: str) -> None:
    assert deciding(rig.tiny_config()) == deciding(change(rig.tiny_config(), key, FREE[key]))


@pytest.mark.parametrize("key", DECIDING)
def test_the_configuration_hash_covers_what_decides_the_weights(key: str) -> None:
    assert deciding(rig.tiny_config()) != deciding(change(rig.tiny_config(), key, DECIDING[key]))


def test_with_a_falling_learning_rate_the_number_of_steps_counts() -> None:
    one, other = (rig.tiny_config(lr_schedule="cosine") for _ in range(2))
    other.total_steps += 1
    assert deciding(one) != deciding(other)


def test_what_decides_the_last_bits_is_listed_apart() -> None:
    now = numerics(change(rig.tiny_config(), "trainer.threads", 2), "cpu")
    assert differences(numerics(rig.tiny_config(), "cpu"), now) == ["trainer.threads was 1 and is 2"]
    assert json.loads(json.dumps(now)) == now and now["torch"]


def test_no_number_of_ranks_and_no_layout_of_the_base_decides_a_bit() -> None:
    before = numerics(rig.tiny_config(), "cpu")
    for key, value in {"num_workers": 3, "shard": "none", "shard_size": 2}.items():
        assert differences(before, numerics(change(rig.tiny_config(), f"trainer.{key}", value), "cpu")) == []


def test_devices_per_worker_count_where_the_engine_spreads_its_network_over_them() -> None:
    one, four = rig.tiny_config(), change(rig.tiny_config(), "rollout.gpus_per_worker", 4.0)
    assert differences(numerics(one, "cpu"), numerics(four, "cpu")) == []
    one.rollout.engine = four.rollout.engine = "vllm_omni"
    assert differences(numerics(one, "cpu"), numerics(four, "cpu")) == ["rollout.gpus_per_worker was 1.0 and is 4.0"]
    assert deciding(one) == deciding(four)


def test_the_modules_write_no_pickle() -> None:
    files = sorted(Path(store.__file__).parent.glob("checkpoint*.py"))
    assert [file.stem for file in files] == ["checkpoint", "checkpoint_folder"]
    assert not [file for file in files if "pickle" in file.read_text()]
