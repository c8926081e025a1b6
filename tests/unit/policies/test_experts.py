"""Tests of models with two experts (Wan 2.2): which one computes, what a step trains, and LoRAs that are two files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_flowrl.cli.export_source import read_source, write_lora
from async_flowrl.cli.generate import run_of
from async_flowrl.cli.model_card import write_card
from async_flowrl.config.schema import LoraConfig, TrainerConfig
from async_flowrl.policies import lora_file, trained_file
from async_flowrl.policies.experts import Experts
from async_flowrl.policies.lora import lora_parameters, targeted_modules
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import load_policy, resolve_model, weights_of
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.optimizer import Optimizer, step_over_lr
from checkpoint_engine import base_digest
from tests.support.families import adapted, conditioning, how, model_config, pipeline_of, policy_of
from tests.support.shared_models import SharedModels

SIZE = (5, 32, 48)


def latents(policy: PipelinePolicy, rows: int) -> Tensor:
    return torch.randn(rows, *policy.latent_shape(SIZE), generator=torch.Generator().manual_seed(0))


@pytest.mark.extended
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_each_row_is_computed_by_the_expert_of_its_level(cfg: float, shared_models: SharedModels) -> None:
    policy = shared_models.policy("wan22")
    network = policy.transformer
    assert isinstance(network, Experts) and network.boundary == 875.0
    sampling = replace(how("wan22", cfg=cfg), resolution=SIZE, true_cfg_scale_2=2.0)
    positive, negative = conditioning(policy)
    sigma = torch.tensor([0.5, 0.875, 1.0, 0.8749])
    x = latents(policy, len(sigma))
    with torch.no_grad():
        mixed = policy.velocity(x, sigma, positive, negative, sampling)
        for row, high in enumerate((False, True, True, False)):
            other = network.transformer_2 if high else network.transformer
            handle = other.register_forward_pre_hook(lambda *_: pytest.fail("the other expert computes"))
            alone = policy.velocity(x[row : row + 1], sigma[row : row + 1], positive, negative, sampling)
            handle.remove()
            assert torch.allclose(alone[0], mixed[row], atol=1e-5)
    low = policy.velocity(x[:1], sigma[:1], positive, negative, replace(sampling, true_cfg_scale_2=None))
    assert torch.allclose(low[0], mixed[0], atol=1e-5) is (cfg == 1.0)


@pytest.mark.parametrize(("quantize", "weights"), [(None, "files"), ("int8", "files"), ("nf4", "random")])
def test_every_road_has_both_with_the_same_bits_and_keeps_the_same_weights_in_float32(
    quantize: str | None, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(model_config("wan22"), dtype="bfloat16", quantize=quantize, weights=weights)
    built = resolve_model(config)
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path))
    digests = set()
    for parts in ("all", "cached", "transformer"):
        network = load_policy(built, dtype="bfloat16", device="cpu", parts=parts).transformer
        assert isinstance(network, Experts)
        digests.add(base_digest(dict(network.named_parameters())))
    assert digests == {base_digest(weights_of(built), {name for name, _ in network.named_parameters()})}
    shapes = load_policy(built, dtype="bfloat16", device="cpu", parts="structure").transformer
    kept, planned = (
        {name for name, parameter in each.named_parameters() if parameter.dtype == torch.float32}
        for each in (network, shapes)
    )
    assert {"time_embedder", "scale_shift_table", "norm2"} <= {part for name in kept for part in name.split(".")}
    assert kept == planned < {name for name, _ in network.named_parameters()}


@pytest.mark.parametrize("form", ["diffusers", "peft"])
def test_a_lora_round_trips_through_the_stock_pipeline(form: str, tmp_path: Path) -> None:
    policy, pipeline = adapted("wan22", lora=LoraConfig(rank=4, alpha=10.0)), pipeline_of("wan22")
    tensors = {name: parameter.detach() for name, parameter in lora_parameters(policy.transformer).items()}
    write = lora_file.write if form == "diffusers" else lora_file.write_peft
    write(tmp_path / "lora", tensors, alpha=10.0)
    source = lora_file.read(tmp_path / "lora")
    assert source.tensors.keys() == tensors.keys()
    read = read_source(tmp_path / "lora")
    assert read.lora.tensors.keys() == tensors.keys()
    write_lora(read, tmp_path / "exported")
    card = write_card(tmp_path / "exported", read, {}).read_text()
    for expert in policy.experts:
        assert f'PeftModel.from_pretrained(pipe.{expert}, "THIS_FOLDER/peft/{expert}")' in card
        assert f"`peft/{expert}/{lora_file.PEFT_WEIGHTS}`" in card
    restored = source.with_alpha(10.0).tensors
    assert all(torch.allclose(restored[name], tensors[name]) for name in tensors)
    if form == "diffusers":
        options = {"weight_name": lora_file.FILE_NAME}  # As the model card says.
        pipeline.load_lora_weights(tmp_path / "lora", subfolder="transformer", **options)
        pipeline.load_lora_weights(
            tmp_path / "lora", subfolder="transformer_2", load_into_transformer_2=True, **options
        )
    else:
        trained_file.apply(pipeline, tmp_path / "lora")
    assert pipeline.get_list_adapters() == {"transformer": ["default_0"], "transformer_2": ["default_0"]}
    positive, _ = conditioning(policy)
    x = latents(policy, 2)
    for level, network in ((0.9, pipeline.transformer), (0.5, pipeline.transformer_2)):
        sigma = torch.full((2,), level)
        text = positive["prompt_embeds"].expand(2, -1, -1)
        with torch.no_grad():
            ours = policy.velocity(x, sigma, positive, None, replace(how("wan22"), resolution=SIZE))
            theirs = network(x, 1000 * sigma, text, return_dict=False)[0]
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("missing", ["transformer", "transformer_2"])
def test_half_of_a_lora_is_refused_by_the_file_that_is_missing(missing: str, tmp_path: Path) -> None:
    tensors = lora_parameters(adapted("wan22").transformer)
    lora_file.write(tmp_path, tensors, alpha=4.0)
    (tmp_path / missing / lora_file.FILE_NAME).unlink()
    for read in (lora_file.read, read_source):
        with pytest.raises(ValueError, match=f"{missing}/{lora_file.FILE_NAME} is missing$"):
            read(tmp_path)


def test_an_experts_folder_belongs_to_its_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for place in ("lora", "lora/transformer_2", "transformer_2"):
        (tmp_path / place).mkdir(parents=True)
        assert run_of(tmp_path / place) == tmp_path


@pytest.mark.extended
def test_whole_weights_are_two_folders_that_load_into_the_stock_pipeline(tmp_path: Path) -> None:
    policy, pipeline = policy_of("wan22"), pipeline_of("wan22")
    state = {name: tensor + 0.01 for name, tensor in policy.transformer.named_parameters()}
    written = trained_file.save_whole(tmp_path / "transformer", state, resolve_model(model_config("wan22")))
    trained_file.apply(pipeline, written)
    for expert in policy.experts:
        loaded = getattr(pipeline, expert).named_parameters()
        assert all(torch.equal(tensor, state[f"{expert}.{name}"]) for name, tensor in loaded)


def test_a_lora_of_one_network_and_targets_of_one_expert_are_refused(
    tmp_path: Path, shared_models: SharedModels
) -> None:
    one = {name: p.detach() for name, p in lora_parameters(adapted("wan").transformer).items()}
    lora_file.save(tmp_path, one, alpha=4.0)
    with pytest.raises(ValueError, match=r"1 networks.* 2$"):
        trained_file.apply(pipeline_of("wan22"), tmp_path)
    policy = shared_models.policy("wan22")
    config = LoraConfig(rank=4, alpha=4.0, targets=["transformer.blocks.0.attn1.to_q"])
    with pytest.raises(ValueError, match=r"^lora\.targets .*transformer_2"):
        targeted_modules(policy.transformer, config, policy)


def parameters() -> dict[str, nn.Parameter]:
    drawn = torch.Generator().manual_seed(3)
    shapes = {"transformer.b": (5, 7), "transformer.a": (70,), "transformer_2.a": (70,)}
    return {name: nn.Parameter(torch.randn(shape, generator=drawn)) for name, shape in shapes.items()}


def test_an_expert_without_gradient_is_left_as_it_is_and_counts_its_own_steps() -> None:
    """Three steps of one expert, then two of the other, as two optimizers would make them; a resume in between."""
    config = TrainerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1e9)
    ours, alone = FlatParameters(parameters(), torch.device("cpu"), ("transformer", "transformer_2")), parameters()
    optimizer = Optimizer(config, ours)
    drawn = torch.Generator().manual_seed(1)
    settings: dict[str, Any] = {"lr": 1e-2, "betas": tuple(config.betas), "eps": config.eps, "weight_decay": 0.1}
    theirs = {
        expert: torch.optim.AdamW([p for n, p in alone.items() if n.startswith(f"{expert}.")], **settings)
        for expert in ("transformer", "transformer_2")
    }
    for count, expert in enumerate([*["transformer"] * 3, *["transformer_2"] * 2, "transformer"]):
        ours.gradients.zero_()
        for name, gradient in ours.named(ours.gradients).items():
            alone[name].grad = None
            if name.startswith(f"{expert}."):
                gradient.copy_(torch.randn(gradient.shape, generator=drawn))
                alone[name].grad = gradient.clone()
        norms = optimizer.gradient_norms()
        assert max(norms, key=lambda name: norms[name]) == expert
        before, metrics = ours.snapshot(), optimizer.step(1e-2, norms)
        assert metrics[f"grad_norm/{expert}"] == norms[expert]
        numbers = {"transformer": 105, "transformer_2": 70}[expert]
        assert metrics["optimizer/rms_over_eps"] == pytest.approx(norms[expert] / numbers**0.5 / config.eps)
        change = float((ours.values.data - before).norm())
        assert optimizer.stepped == numbers
        assert step_over_lr(before, ours, 1e-2, optimizer.stepped) == pytest.approx(change / 1e-2 / numbers**0.5)
        theirs[expert].step()
        assert all(torch.allclose(view, alone[name]) for name, view in ours.named(ours.values).items())
        if count == 3:
            assert optimizer.expert_steps == {"transformer": 3, "transformer_2": 1}
            resumed = Optimizer(config, ours)
            resumed.load(optimizer.state(), optimizer.steps, optimizer.expert_steps)
            optimizer = resumed
    assert optimizer.expert_steps == {"transformer": 4, "transformer_2": 2} and optimizer.steps == 6
