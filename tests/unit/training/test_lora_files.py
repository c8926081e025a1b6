"""Tests of files of adapters: warm starts from those of diffusers and PEFT, refusals, and files that are written."""

import copy
from pathlib import Path

import peft
import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import (
    add_lora,
    load_warm_start,
    lora_parameters,
)
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.support.tiny import adapted_policy, randomise, tiny_policy
from tests.unit.training.lora_values import snapshot


def peft_folder(folder: Path, config: peft.LoraConfig) -> dict[str, Tensor]:
    """A PEFT adapter as `get_peft_model(...).save_pretrained` leaves it; returns its tensors by layout name."""
    model = get_peft_model(copy.deepcopy(tiny_policy(parts="transformer").transformer), config)
    randomise({name: p for name, p in model.named_parameters() if "lora_" in name})
    model.save_pretrained(folder)
    found = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in found.items()}


def warm(path: Path, **changes: object) -> dict[str, Tensor]:
    config = LoraConfig(**{"rank": 4, "alpha": 6.0, "path": str(path), **changes})  # type: ignore[arg-type]
    policy = tiny_policy(parts="transformer")
    add_lora(policy.transformer, config, policy, seed=0)
    load_warm_start(policy.transformer, config, policy)
    return snapshot(policy)


@pytest.fixture
def diffusers_file(tmp_path: Path) -> Path:
    policy = adapted_policy(config=LoraConfig(rank=4, alpha=6.0))
    return lora_file.write(tmp_path / "lora", lora_parameters(policy.transformer), alpha=6.0)


def test_warm_start_from_a_diffusers_file_and_folder(diffusers_file: Path) -> None:
    source = lora_file.read(diffusers_file)
    assert (source.rank, source.alpha) == (4, 4.0)
    expected = snapshot(adapted_policy(config=LoraConfig(rank=4, alpha=6.0)))
    for path in (diffusers_file, diffusers_file.parent):
        loaded = warm(path)
        assert loaded.keys() == expected.keys()
        assert all(torch.allclose(loaded[name], expected[name], rtol=1e-6, atol=0.0) for name in loaded)


def test_a_warm_start_with_another_alpha_is_the_same_lora(diffusers_file: Path) -> None:
    one, other = warm(diffusers_file, alpha=8.0), warm(diffusers_file, alpha=4.0)
    for name, tensor in one.items():
        assert torch.equal(tensor * 2 if "lora_B" in name else tensor, other[name])


def test_warm_start_from_a_peft_folder_even_with_dead_branches(tmp_path: Path) -> None:
    targets = list(QwenImagePolicy.lora_targets)
    written = peft_folder(tmp_path, peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=targets))
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        loaded = warm(path)
        assert len(written) == len(loaded) + 8
        assert all(torch.equal(loaded[name], written[name]) for name in loaded)


def without_metadata(source: Path, target: Path) -> Path:
    target.mkdir()
    save_file(load_file(source), target / lora_file.FILE_NAME)
    return target


def test_without_metadata_alpha_is_the_rank_as_diffusers_reads_it(diffusers_file: Path, tmp_path: Path) -> None:
    bare = without_metadata(diffusers_file, tmp_path / "bare")
    assert lora_file.read(bare).alpha == 4.0
    expected = warm(diffusers_file)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in warm(bare).items())


def test_a_written_file_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    parameters: dict[str, nn.Parameter] = lora_parameters(adapted_policy(parts="transformer").transformer)
    shuffled = dict(reversed(parameters.items()))
    one = lora_file.write(tmp_path / "one", parameters, alpha=16.0)
    two = lora_file.write(tmp_path / "two", shuffled, alpha=16.0)
    assert one.read_bytes() == two.read_bytes()
    assert [entry.name for entry in one.parent.iterdir()] == [lora_file.FILE_NAME]
    with pytest.raises(ValueError, match="no LoRA tensors"):
        lora_file.write(tmp_path / "three", {}, alpha=1.0)
