"""Tests of the adapter: attaching, naming and switching it; warm starts from files of diffusers and PEFT."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import add_lora, load_warm_start, lora_modules, lora_parameters, reference_mode
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.support.tiny import RED, adapted_policy, randomise, sampling, tensors, tiny_policy


def snapshot(policy: QwenImagePolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}


def output(policy: QwenImagePolicy) -> Tensor:
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    if policy.pipeline is None:
        positive = {"prompt_embeds": torch.randn(13, 32, generator=torch.Generator().manual_seed(1))}
    else:
        positive = tensors(policy.encode([RED.text])[0])
    return policy.velocity(x, torch.tensor([0.9, 0.3]), positive, None, sampling())


def test_a_new_adapter_changes_nothing_and_disturbs_no_random_state() -> None:
    policy = tiny_policy(parts="transformer")
    before = output(policy)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    add_lora(policy.transformer, LoraConfig(8, 16.0), policy, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(output(policy), before)


def test_exactly_the_adapter_is_trainable() -> None:
    policy = adapted_policy(parts="transformer")
    trainable = {name for name, p in policy.transformer.named_parameters() if p.requires_grad}
    assert len(trainable) == len(lora_parameters(policy.transformer))
    assert all(".lora_" in name for name in trainable)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_without_a_graph_gives_the_bits_of_one_with_a_graph(dtype: str) -> None:
    """Without a graph it adds to Wx in place, with one it does not; the trainer replays what a rollout recorded."""
    policy = adapted_policy(dtype=dtype)
    randomise(lora_parameters(policy.transformer))
    layer: Any = next(iter(lora_modules(policy.transformer).values()))
    wide = layer.get_base_layer().weight.shape[1]
    x = torch.randn(3, 5, wide, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    kept, with_graph = x.clone(), layer(x)
    with torch.no_grad():
        without = layer(x)
    assert with_graph.requires_grad and not without.requires_grad
    assert torch.equal(with_graph, without) and torch.equal(x, kept)
    assert not torch.equal(without, layer.get_base_layer()(x)), "the adapter has an effect"
    live = output(policy)
    with torch.no_grad():
        assert torch.equal(output(policy), live)


def test_reference_mode_is_the_base_exactly_and_leaves_no_trace() -> None:
    base, policy = tiny_policy(parts="transformer"), adapted_policy(parts="transformer")
    live, expected = output(policy), output(base)
    with reference_mode(policy.transformer):
        assert all(p.requires_grad for p in lora_parameters(policy.transformer).values())
        assert torch.equal(output(policy), expected)
        with reference_mode(policy.transformer):
            pass
        assert torch.equal(output(policy), expected)
    assert not torch.equal(live, expected)
    assert torch.equal(output(policy), live)
    with pytest.raises(KeyError), reference_mode(policy.transformer):
        raise KeyError
    assert torch.equal(output(policy), live)


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


def test_without_metadata_alpha_is_the_rank_as_diffusers_reads_it(diffusers_file: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(diffusers_file), bare)
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
