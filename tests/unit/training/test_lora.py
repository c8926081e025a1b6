"""Tests of the adapter: attaching, naming and switching it; warm starts from files of diffusers and PEFT."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from async_flowrl.config.sections.tune import LoraConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora import (
    add_lora,
    compute_copies,
    load_tensors,
    load_warm_start,
    lora_layers,
    lora_modules,
    lora_parameters,
    reference_mode,
)
from async_flowrl.policies.qwen_image import QwenImagePolicy
from tests.support.tiny import RED, adapted_policy, randomise, sampling, tensors, tiny_policy


def output(policy: QwenImagePolicy) -> Tensor:
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    if policy._pipeline is None:
        positive = {"prompt_embeds": torch.randn(13, 32, generator=torch.Generator().manual_seed(1))}
    else:
        positive = tensors(policy.encode([RED.text])[0])
    return policy.velocity(x, torch.tensor([0.9, 0.3]), positive, None, sampling())


def snapshot(policy: QwenImagePolicy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}


def test_a_new_adapter_changes_nothing_and_disturbs_no_random_state() -> None:
    policy = tiny_policy(parts="transformer")
    before = output(policy)
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    add_lora(policy.transformer, LoraConfig(), policy, seed=0)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(output(policy), before)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    def initial(config: LoraConfig, seed: int) -> dict[str, Tensor]:
        policy = tiny_policy(parts="transformer")
        add_lora(policy.transformer, config, policy, seed=seed)
        return snapshot(policy)

    whole = initial(LoraConfig(), 0)
    torch.rand(5)
    fewer = initial(LoraConfig(targets=["attn.to_q", "attn.to_v"]), 0)
    assert len(fewer) == 8
    assert all(torch.equal(fewer[name], whole[name]) for name in fewer)
    a = [tensor for name, tensor in whole.items() if name.endswith("lora_A.weight")]
    assert all(bool((tensor == 0).all()) for name, tensor in whole.items() if name.endswith("lora_B.weight"))
    assert torch.cat([tensor.flatten() for tensor in a]).std() == pytest.approx(1 / 8, rel=0.02)
    assert len({float(tensor[0, 0]) for tensor in a}) == len(a)
    assert not torch.equal(initial(LoraConfig(), 1)["transformer_blocks.0.attn.to_q.lora_A.weight"], a[0])


def test_names_are_sorted_and_dead_branches_left_out() -> None:
    policy = adapted_policy()
    names = list(lora_parameters(policy.transformer))
    assert names == sorted(names) and len(names) == 2 * (12 + 12 - 4)
    assert "transformer_blocks.0.attn.to_add_out.lora_A.weight" in names
    dead = ("attn.to_add_out", "attn.add_q_proj", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    assert not [name for name in names if any(f"transformer_blocks.1.{part}." in name for part in dead)]


def test_exactly_the_adapter_is_trainable_and_every_tensor_of_it_gets_a_gradient() -> None:
    policy = adapted_policy()
    trainable = {name for name, p in policy.transformer.named_parameters() if p.requires_grad}
    assert len(trainable) == len(lora_parameters(policy.transformer))
    assert all(".lora_" in name for name in trainable)
    output(policy).square().mean().backward()
    for name, parameter in lora_parameters(policy.transformer).items():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name


def test_the_excluded_branches_really_get_no_gradient() -> None:
    """With every layer adapted, the excluded ones and no others stay without gradient."""

    class Everything:
        lora_exclude = None

        def __init__(self, policy: QwenImagePolicy) -> None:
            self.lora_targets = policy.lora_targets

    policy = tiny_policy()
    add_lora(policy.transformer, LoraConfig(), Everything(policy), seed=0)  # type: ignore[arg-type]
    randomise(lora_parameters(policy.transformer))
    output(policy).square().mean().backward()
    parameters = lora_parameters(policy.transformer)
    without = {name for name, p in parameters.items() if p.grad is None or not bool((p.grad != 0).any())}
    assert {lora_file.module_name(name) for name in without} == {
        f"transformer_blocks.1.{part}"
        for part in ("attn.to_add_out", "attn.add_q_proj", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    }


def test_masters_are_float32_on_a_bfloat16_base() -> None:
    policy = adapted_policy(dtype="bfloat16", parts="transformer")
    assert all(p.dtype == torch.float32 for p in lora_parameters(policy.transformer).values())
    base = [p.dtype for name, p in policy.transformer.named_parameters() if ".lora_" not in name]
    assert set(base) == {torch.bfloat16}
    output(policy).square().mean().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in lora_parameters(policy.transformer).values()
    )


def test_layers_compute_what_their_weights_and_scaling_say() -> None:
    policy = adapted_policy(config=LoraConfig(rank=4, alpha=12.0))
    modules = lora_modules(policy.transformer)
    assert list(modules) == sorted(modules) == list(lora_layers(modules))
    for name, layer in modules.items():
        a, b, scaling = compute_copies(layer)
        assert scaling == 3.0 and a.shape[0] == b.shape[1] == 4, name
        x = torch.randn(5, a.shape[1], generator=torch.Generator().manual_seed(0))
        base = layer.base_layer(x)
        assert torch.allclose(layer(x), base + scaling * (x @ a.T @ b.T), atol=1e-5), name


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


@pytest.mark.parametrize("compiled", [False, True])
def test_reference_mode_is_the_base_exactly_and_leaves_no_trace(compiled: bool) -> None:
    base, policy = tiny_policy(parts="transformer"), adapted_policy(parts="transformer")
    names = list(lora_parameters(policy.transformer))
    if compiled:
        for each in (base, policy):  # the compiler traces one block in half the time
            each.transformer.transformer_blocks = each.transformer.transformer_blocks[:1]
        names = list(lora_parameters(policy.transformer))
        policy.transformer = torch.compile(policy.transformer, backend="eager")  # type: ignore[assignment]
    assert list(lora_parameters(policy.transformer)) == names
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(rank=0), "lora.rank must be at least 1, got 0"),
        (LoraConfig(alpha=0.0), "lora.alpha must be above 0, got 0.0"),
        (LoraConfig(targets=[]), "lora.targets is empty"),
        (
            LoraConfig(targets=["attn.to_q", "attn.to_kk"]),
            "'attn.to_kk' names no .*did you mean attn.to_k?",
        ),
        (LoraConfig(targets=["transformer_blocks.1.txt_mlp.net.2"]), "cannot change the model's output"),
    ],
)
def test_bad_settings_are_refused(config: LoraConfig, message: str) -> None:
    policy = tiny_policy(parts="transformer")
    with pytest.raises(ValueError, match=message):
        add_lora(policy.transformer, config, policy, seed=0)


def test_adapter_sizes_of_the_real_model() -> None:
    """60 blocks of 24 heads x 128: 1440 tensors, 212.3 M parameters at rank 32, less the last block's dead branches.

    All blocks are alike, so three of them are counted.
    """
    blocks = 3
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(num_layers=blocks)
    policy = QwenImagePolicy(transformer, None, side=16, dtype=torch.bfloat16)
    adapter = peft.LoraConfig(r=32, target_modules=list(policy.lora_targets), exclude_modules=policy.lora_exclude)
    transformer.add_adapter(adapter)
    parameters = lora_parameters(transformer)
    dead = 32 * (4 * 2 * 3072 - 2 * 3072 + 2 * (3072 + 4 * 3072) - 2 * 3072)
    assert len(parameters) == 1440 // 60 * blocks - 8
    assert sum(p.numel() for p in parameters.values()) == 212_336_640 // 60 * blocks - dead
    assert len(policy.blocks) == blocks
    assert inspect.signature(QwenImageTransformer2DModel).parameters["num_layers"].default == 60


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
    assert (source.rank, source.alpha) == (4, 6.0)
    for path in (diffusers_file, diffusers_file.parent):
        loaded = warm(path)
        assert loaded.keys() == source.tensors.keys()
        assert all(torch.equal(loaded[name], source.tensors[name]) for name in loaded)


def test_warm_start_from_a_peft_folder_even_with_dead_branches(tmp_path: Path) -> None:
    targets = list(QwenImagePolicy.lora_targets)
    written = peft_folder(tmp_path, peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=targets))
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        loaded = warm(path)
        assert len(written) == len(loaded) + 8
        assert all(torch.equal(loaded[name], written[name]) for name in loaded)


def test_a_warm_start_that_does_not_fit_is_refused(diffusers_file: Path) -> None:
    with pytest.raises(ValueError, match=r"has rank 4, this run lora\.rank=8"):
        warm(diffusers_file, rank=8)
    with pytest.raises(ValueError, match=r"has alpha 6, this run lora\.alpha=4"):
        warm(diffusers_file, alpha=4.0)
    with pytest.raises(ValueError, match=r"it has .* not adapt \(0 tensors missing, 32 too many\)"):
        warm(diffusers_file, targets=["attn.to_q", "attn.to_k"])
    smaller = lora_file.read(diffusers_file).tensors
    kept = {name: tensor for name, tensor in smaller.items() if ".to_q." in name}
    with pytest.raises(ValueError, match=r"it lacks transformer_blocks\.0.* \(36 tensors missing, 0 too many\)"):
        warm(lora_file.write(diffusers_file.parent / "q", kept, alpha=6.0))


def test_tensors_of_another_shape_are_refused_before_anything_is_copied() -> None:
    policy = adapted_policy(parts="transformer")
    before = snapshot(policy)
    wrong = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    last = max(wrong)
    wrong[last] = torch.ones(3, 3)
    with pytest.raises(ValueError, match=rf"{last} is \[3, 3\], expected"):
        load_tensors(policy.transformer, wrong, where="this")
    assert all(torch.equal(tensor, before[name]) for name, tensor in snapshot(policy).items())


def without_metadata(source: Path, target: Path) -> Path:
    target.mkdir()
    save_file(load_file(source), target / lora_file.FILE_NAME)
    return target


def test_without_metadata_alpha_is_the_rank_as_diffusers_reads_it(diffusers_file: Path, tmp_path: Path) -> None:
    bare = without_metadata(diffusers_file, tmp_path / "bare")
    assert lora_file.read(bare).alpha == 4.0
    with pytest.raises(ValueError, match="has alpha 4, this run"):
        warm(bare)


@pytest.mark.parametrize(
    ("key", "value"),
    [("use_dora", True), ("use_rslora", True), ("rank_pattern", {"to_q": 2}), ("alpha_pattern", {"a": 1})],
)
def test_adapters_that_are_not_plain_lora_are_refused(tmp_path: Path, key: str, value: object) -> None:
    peft_folder(tmp_path, peft.LoraConfig(r=4, target_modules=["attn.to_q"]))
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), key: value}))
    with pytest.raises(ValueError, match=f"{key}=.* not supported"):
        lora_file.read(tmp_path)


def test_files_that_are_no_lora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        lora_file.read(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"holds neither pytorch_lora_weights\.safetensors"):
        lora_file.read(tmp_path)
    (tmp_path / "lora.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"is not a \.safetensors file"):
        lora_file.read(tmp_path / "lora.bin")
    save_file({"vae.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds 'vae\.weight', not a diffusers or PEFT LoRA tensor"):
        lora_file.read(tmp_path / "other.safetensors")
    layer = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    save_file({layer: torch.ones(4, 128)}, tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match=r"to_q has no lora_B"):
        lora_file.read(tmp_path / "half.safetensors")


def test_a_written_file_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    parameters: dict[str, nn.Parameter] = lora_parameters(adapted_policy(parts="transformer").transformer)
    shuffled = dict(reversed(parameters.items()))
    one = lora_file.write(tmp_path / "one", parameters, alpha=16.0)
    two = lora_file.write(tmp_path / "two", shuffled, alpha=16.0)
    assert one.read_bytes() == two.read_bytes()
    assert [entry.name for entry in one.parent.iterdir()] == [lora_file.FILE_NAME]
    with pytest.raises(ValueError, match="no LoRA tensors"):
        lora_file.write(tmp_path / "three", {}, alpha=1.0)
