"""Tests of LoRA files with the names of ComfyUI and kohya, read by diffusers' own loaders; other layers are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from async_flowrl.cli.export_source import Source
from async_flowrl.cli.model_card import write_card
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.lora_file import LoraFile
from async_flowrl.seeds import derive, generator
from tests.support.families import NAMES, model_config

RANK, ALPHA = 4, 8.0
ATTENTION = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out")
LAYERS = {
    "sd3": [f"transformer_blocks.{block}.{name}" for block in (0, 11) for name in ATTENTION],
    "flux": [
        *(f"transformer_blocks.{block}.{name}" for block in (0, 11) for name in (*ATTENTION, "ff.net.0.proj")),
        *(f"single_transformer_blocks.1.{name}" for name in ("attn.to_q", "attn.to_v", "proj_out")),
    ],
    "flux_kontext": [f"transformer_blocks.0.{name}" for name in ("attn.to_out.0", "ff.net.2")],
    "qwen_image_edit": ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mlp.net.0.proj"],
    "qwen_image_21": [f"transformer_blocks.0.img_mlp.{name}" for name in ("gate_layer", "proj", "out")],
}


def adapter(family: str, *, alpha: float = ALPHA, width: int = 16) -> LoraFile:
    tensors = {}
    for layer in LAYERS[family]:
        for side, shape in (("A", (RANK, width)), ("B", (width, RANK))):
            name = f"{layer}.lora_{side}.weight"
            tensors[name] = torch.randn(shape, generator=generator(derive(0, name)))
    return LoraFile(tensors, RANK, alpha)


def scaled(source: LoraFile) -> dict[str, Tensor]:
    """The tensors with the factor alpha / rank in B, as every file has them."""
    scale = source.alpha / source.rank
    return {name: t * scale if "lora_B" in name else t for name, t in source.tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_alpha_stands_beside_fluxs_tensors_and_not_beside_sd3s(tmp_path: Path) -> None:
    """ComfyUI scales by 1 where there is no alpha; diffusers' loader of Stable Diffusion 3 refuses one."""
    flux = adapter("flux")
    written = lora_formats.write(tmp_path / "flux.safetensors", flux, family="flux", form="comfyui")
    found = lora_formats.read_back(written, "flux")
    assert same(found.tensors, scaled(flux)) and (found.rank, found.alpha) == (RANK, RANK)
    assert float(load_file(written)["transformer.transformer_blocks.0.attn.to_q.alpha"]) == RANK
    sd3 = adapter("sd3", alpha=10.0)
    written = lora_formats.write(tmp_path / "sd3.safetensors", sd3, family="sd3", form="comfyui")
    assert same(lora_formats.read_back(written, "sd3").tensors, scaled(sd3))
    assert not [name for name in load_file(written) if "alpha" in name]


@pytest.mark.parametrize("form", ["comfyui", "kohya"])
@pytest.mark.parametrize(("plain", "editing"), [("qwen_image", "qwen_image_edit"), ("flux", "flux_kontext")])
def test_a_model_that_edits_has_the_names_of_the_other(plain: str, editing: str, form: str, tmp_path: Path) -> None:
    source = adapter(editing)
    written = {
        family: lora_formats.write(tmp_path / f"{family}.safetensors", source, family=family, form=form)
        for family in (plain, editing)
    }
    assert same(load_file(written[plain]), load_file(written[editing]))
    assert same(lora_formats.read_back(written[editing], editing).tensors, scaled(source))


@pytest.mark.parametrize(("family", "sources"), [("qwen_image_edit", False), ("qwen_image_21", True)])
def test_the_card_of_a_model_that_edits_says_so_twice(family: str, sources: bool, tmp_path: Path) -> None:
    """A family that needs images, or a run that had some."""
    (tmp_path / "run" / "images").mkdir(parents=True)
    source = Source(adapter(family), model_config(family), None, tmp_path / "run", None)
    if sources:
        plain = write_card(tmp_path, source, {}).read_text()
        assert "pipeline_tag: text-to-image" in plain and "image=" not in plain
        (tmp_path / "run" / "images" / "sources").mkdir()
    card = write_card(tmp_path, source, {}).read_text()
    assert "pipeline_tag: image-to-image" in card and "image=IMAGE" in card


def test_fluxs_projections_are_fused_for_kohya_and_come_apart_again(tmp_path: Path) -> None:
    source = adapter("flux", width=3072)
    written = lora_formats.write(tmp_path / "flux.safetensors", source, family="flux", form="kohya")
    held = load_file(written)
    assert held["lora_unet_double_blocks_11_img_attn_qkv.lora_down.weight"].shape == (3 * RANK, 3072)
    assert held["lora_unet_single_blocks_1_linear1.lora_up.weight"].shape == (3 * 3072 + 12288, 4 * RANK)
    assert float(held["lora_unet_single_blocks_1_linear1.alpha"]) == 4 * RANK
    found = lora_formats.read_back(written, "flux").tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in scaled(source).items())
    extra = found.keys() - source.tensors.keys()
    assert {lora_file.module_name(name).split(".", 2)[2] for name in extra} == {
        "attn.to_k",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "proj_mlp",
    }
    assert not any(found[name].any() for name in extra)


@pytest.mark.skipif("qwen_image_21" not in NAMES, reason="diffusers is older than the family")
def test_the_gates_of_qwen_image_21_reach_the_fused_layer_of_comfyui(tmp_path: Path) -> None:
    """By the rule of its comfy/lora.py: a LoRA of `gate_layer` is for the first half of `gate_up`, one of `proj` for
    the second, under diffusers' names with or without `transformer.`, and not under `diffusion_model.`."""
    mlp = "transformer_blocks.0.img_mlp"
    fused = {f"{mlp}.gate_up": torch.zeros(32, 16), f"{mlp}.out": torch.zeros(16, 16)}
    known: dict[str, tuple[str, slice]] = {}
    for name, weight in fused.items():
        halves = {"gate_layer": slice(0, 16), "proj": slice(16, 32)} if "gate_up" in name else {"out": slice(16)}
        known |= {f"transformer.{mlp}.{half}": (name, rows) for half, rows in halves.items()}
        known[f"diffusion_model.{name}"] = name, slice(len(weight))
    source = adapter("qwen_image_21")
    written = lora_formats.write(tmp_path / "it.safetensors", source, family="qwen_image_21", form="comfyui")
    held = load_file(written)
    for module in lora_file.modules_of(held):
        name, rows = known[module]
        fused[name][rows] += held[f"{module}.lora_B.weight"] @ held[f"{module}.lora_A.weight"]
    deltas = {
        layer: source.alpha / RANK * source.tensors[f"{layer}.lora_B.weight"] @ source.tensors[f"{layer}.lora_A.weight"]
        for layer in LAYERS["qwen_image_21"]
    }
    gate_up = torch.cat([deltas[f"{mlp}.gate_layer"], deltas[f"{mlp}.proj"]])
    assert torch.allclose(fused[f"{mlp}.gate_up"], gate_up, atol=1e-5) and gate_up.abs().min(dim=1).values.max() > 0
    assert torch.allclose(fused[f"{mlp}.out"], deltas[f"{mlp}.out"], atol=1e-5)
    assert same(lora_formats.read_back(written, "qwen_image_21").tensors, scaled(source))


@pytest.mark.skipif("qwen_image_21" not in NAMES, reason="diffusers is older than the family")
def test_a_lora_of_the_fused_layer_itself_comes_apart(tmp_path: Path) -> None:
    """As trainers of ComfyUI's network write it: one A for both halves, the gate's rows of B first."""
    mlp = "transformer_blocks.1.img_mlp"
    a, b = torch.randn(RANK, 16), torch.randn(32, RANK)
    fused = {f"diffusion_model.{mlp}.gate_up.lora_{side}.weight": t for side, t in (("A", a), ("B", b))}
    save_file(fused, tmp_path / "it.safetensors")
    found = lora_formats.read_back(tmp_path / "it.safetensors", "qwen_image_21").tensors
    expected = {f"{mlp}.{layer}.lora_A.weight": a for layer in ("gate_layer", "proj")}
    expected |= {f"{mlp}.gate_layer.lora_B.weight": b[:16], f"{mlp}.proj.lora_B.weight": b[16:]}
    assert same(found, expected)
