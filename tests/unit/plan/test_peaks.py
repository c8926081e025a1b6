"""Tests of remembered peaks: equal to what is counted anew, and counted once for what does not change them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory import peaks
from async_flowrl.memory.meta_model import build_meta_model
from async_flowrl.memory.peaks import remembered_training_peak, sampling_peak, training_peak
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import resolve_model


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations whose networks were built for a peak, with nothing remembered before."""
    asked: list[Config] = []
    kept: Callable[[Config], object] = peaks.build_meta_model
    monkeypatch.setattr(peaks, "_counted", {})
    monkeypatch.setattr(peaks, "build_meta_model", lambda config: (asked.append(config), kept(config))[1])
    return asked


def tiny(*words: str) -> Config:
    return compose_config("one_step_off", ["model=tiny_sd3", "model.tiny.layers=2", *words])


def test_the_number_of_ranks_and_their_shares_of_the_base_change_no_peak(built: list[Config]) -> None:
    alone = tiny("trainer.gradient_checkpointing=none")
    sharded = replace(alone, trainer=replace(alone.trainer, num_workers=4, shard="hybrid", shard_size=2))
    assert remembered_training_peak(alone) == remembered_training_peak(sharded)
    assert len(built) == 1
    counted = {training_peak(each, build_meta_model(each)) for each in (alone, sharded)}
    assert counted == {remembered_training_peak(alone)}, "which the peak itself says"


def test_a_model_of_the_same_relative_path_in_another_folder_is_counted_anew(
    built: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, config in (("few", tiny()), ("many", tiny("model.tiny.layers=6"))):
        config.trainer.gradient_checkpointing = "none"
        shutil.copytree(resolve_model(config.model).path, tmp_path / name / "model")
    config = compose_config("one_step_off", [f"model.path={tmp_path / 'few' / 'model'}"])
    config.trainer.gradient_checkpointing, config.model.path = "none", "model"
    found = set()
    for name in ("few", "many"):
        monkeypatch.chdir(tmp_path / name)
        found.add(remembered_training_peak(config))
    assert len(found) == len(built) == 2


def test_what_changes_it_is_counted_anew(built: list[Config]) -> None:
    before = remembered_training_peak(tiny("trainer.gradient_checkpointing=none"))
    words = [
        "trainer.gradient_checkpointing=full",
        "trainer.micro_batch_size=3",
        "rollout.resolution=64",
        "lora.rank=2",
    ]
    for count, word in enumerate(words, start=2):
        changed = tiny("trainer.gradient_checkpointing=none", word)
        assert remembered_training_peak(changed) != before and len(built) == count, word


def test_decoding_is_counted_once_and_anew_for_what_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    kept = PipelinePolicy._decoded

    def counting(self: PipelinePolicy, *args: Any) -> Any:
        decoded.append(self.title)
        return kept(self, *args)

    monkeypatch.setattr(peaks, "_counted", {})
    monkeypatch.setattr(PipelinePolicy, "_decoded", counting)
    plain, larger = ("rollout.resolution=128", "lora.rank=2"), ("rollout.resolution=128", "lora.rank=4")
    first, again = (sampling_peak(tiny(*words), build_meta_model(tiny(*words))) for words in (plain, larger))
    assert first <= again and len(decoded) == 1
    for count, word in enumerate(
        ["rollout.resolution=160", "rollout.batch_size=2", "rollout.vae_slicing=true"], start=2
    ):
        config = tiny(*plain, word)
        assert sampling_peak(config, build_meta_model(config)) != first and len(decoded) == count, word


def test_no_numbers_are_drawn_for_a_network_of_shapes() -> None:
    """Neither for the base nor for the LoRA: most of a large plan's time went into initial values that it drops."""
    drawn: list[str] = []

    class Drawn(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.uniform_.default:
                drawn.append(args[0].device.type)
            return func(*args, **(kwargs or {}))

    with Drawn():
        model = build_meta_model(tiny())
    assert set(drawn) == {"meta"}
    assert all(parameter.is_meta for parameter in lora_parameters(model.policy.transformer).values())
