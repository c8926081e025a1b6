"""Tests of checkpoints: complete or absent, and a resumed run has the bits of the undisturbed one."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_flowrl.training.checkpoint import (
    FORMAT,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_step,
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from tests.support import trainer_rig as rig


def small(value: float = 1.0) -> Checkpoint:
    tensors = {"weights": {"b": torch.full((3,), value), "a": torch.arange(4.0).view(2, 2)}, "optimizer": {}}
    return Checkpoint(tensors, {"version": 1}, {"digests": {"0": "abc"}})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (0, 2, 4, 10):
        write_checkpoint(tmp_path, step, small(), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_4", "step_10", "latest"}
    write_checkpoint(tmp_path, 5, small(2.0), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step_4", "step_5", "latest"}, "step 10 is of an abandoned history"
    write_checkpoint(tmp_path, 5, small(3.0), keep=2)
    newest = find_checkpoint(tmp_path)
    assert newest is not None and float(read_checkpoint(newest).tensors["weights"]["b"][0]) == 3.0


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "no_manifest", "controller"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, 1, small(), keep=3)
    newest = write_checkpoint(tmp_path, 2, small(), keep=3)
    weights, manifest = newest / "weights.safetensors", newest / "manifest.json"
    data, text = bytearray(weights.read_bytes()), manifest.read_text()
    data[-1] ^= 1
    damages: dict[str, Callable[[], object]] = {
        "flip": lambda: weights.write_bytes(data),
        "truncate": lambda: weights.write_bytes(data[:-4]),
        "remove": weights.unlink,
        "manifest": lambda: manifest.write_text(text[: len(text) // 2]),
        "no_manifest": manifest.unlink,
        "controller": lambda: (newest / "controller.json").write_text(json.dumps({"digests": {"0": "abd"}})),
    }
    damages[damage]()
    with pytest.raises(DamagedCheckpoint, match="step_2"):
        read_checkpoint(newest)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path) == tmp_path / "step_1"
    assert "step_2" in caplog.text and "trying an older one" in caplog.text


def test_a_checkpoint_of_another_format_is_refused_by_that_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, small(), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": FORMAT - 1}))
    with pytest.raises(DamagedCheckpoint, match=f"has format {FORMAT - 1}, this version reads {FORMAT}"):
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
    forgetful.optimizer.load({}, 0, {})
    rig.update(forgetful, 2, stale)
    assert forgetful.parameters.fingerprint() != whole.parameters.fingerprint(), (
        "Adam's moments matter, so they are in the checkpoint"
    )
