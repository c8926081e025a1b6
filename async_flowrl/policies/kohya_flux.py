"""Conversion of a FLUX.1 LoRA to the format of kohya's sd-scripts; lora_formats.py uses it.

sd-scripts' network has one fused projection where diffusers has several, e.g. q, k and v. Their LoRAs become one LoRA
with the sum of their ranks: the A are stacked, the B are block-diagonal, and zeros stand for a projection without LoRA.
Alpha is multiplied by the same factor as the rank, so alpha / rank stays.
"""

import re

import torch
from torch import Tensor

from async_flowrl.policies.lora_file import LoraFile, modules_of

WIDTH = 3072
"""Width of FLUX.1. diffusers splits `linear1` of a single block into 3072 each for q, k, v, and 12288 for the MLP."""
_MLP_WIDTH = 4 * WIDTH
_DOUBLE, _SINGLE = re.compile(r"transformer_blocks\.(\d+)\.(.+)"), re.compile(r"single_transformer_blocks\.(\d+)\.(.+)")
_FUSED = {
    "attn.to_q": ("img_attn_qkv", 0),
    "attn.to_k": ("img_attn_qkv", 1),
    "attn.to_v": ("img_attn_qkv", 2),
    "attn.add_q_proj": ("txt_attn_qkv", 0),
    "attn.add_k_proj": ("txt_attn_qkv", 1),
    "attn.add_v_proj": ("txt_attn_qkv", 2),
}
"""diffusers' layer of a double block → (fused layer of sd-scripts, position in it)."""
_FUSED_SINGLE = {
    "attn.to_q": ("linear1", 0),
    "attn.to_k": ("linear1", 1),
    "attn.to_v": ("linear1", 2),
    "proj_mlp": ("linear1", 3),
}
"""The same for single blocks."""
_NAMES = {
    "attn.to_out.0": "img_attn_proj",
    "attn.to_add_out": "txt_attn_proj",
    "ff.net.0.proj": "img_mlp_0",
    "ff.net.2": "img_mlp_2",
    "ff_context.net.0.proj": "txt_mlp_0",
    "ff_context.net.2": "txt_mlp_2",
    "norm1.linear": "img_mod_lin",
    "norm1_context.linear": "txt_mod_lin",
}
"""diffusers' layer of a double block → the same layer in sd-scripts."""
_NAMES_SINGLE = {"proj_out": "linear2", "norm.linear": "modulation_lin"}
"""The same for single blocks."""


def convert(source: LoraFile) -> dict[str, Tensor]:
    """Returns tensors named `lora_unet_<block>_<layer>.lora_down.weight`, `.lora_up.weight` and `.alpha`.

    Raises ValueError for a layer that has no name in this format, and for single blocks of another width than FLUX.1's.
    """
    tensors: dict[str, Tensor] = {}
    fused: dict[str, dict[int, str]] = {}
    for module in modules_of(source.tensors):
        block, layer, place = _found(module)
        if place is None:
            a, b = _matrices(source, module)
            tensors |= _entry(f"{block}_{layer}", a, b, source.alpha)
        else:
            fused.setdefault(f"{block}_{layer}", {})[place] = module
    for name, modules in fused.items():
        single = name.endswith("linear1")
        parts = 4 if single else 3
        a, b = _joined(source, modules, [WIDTH] * 3 + [_MLP_WIDTH] if single else [_width(source, modules)] * 3)
        tensors |= _entry(name, a, b, source.alpha * parts)
    return tensors


def _found(module: str) -> tuple[str, str, int | None]:
    """Returns block, layer, and the position in a fused projection; None for a layer that is not fused."""
    single, double = _SINGLE.fullmatch(module), _DOUBLE.fullmatch(module)
    match, names, groups, kind = (
        (single, _NAMES_SINGLE, _FUSED_SINGLE, "single") if single else (double, _NAMES, _FUSED, "double")
    )
    if match is not None and match[2] in names:
        return f"lora_unet_{kind}_blocks_{match[1]}", names[match[2]], None
    if match is not None and match[2] in groups:
        return f"lora_unet_{kind}_blocks_{match[1]}", *groups[match[2]]
    raise ValueError(f"--format kohya has no name for FLUX.1's layer {module}")


def _matrices(source: LoraFile, module: str) -> tuple[Tensor, Tensor]:
    return source.tensors[f"{module}.lora_A.weight"], source.tensors[f"{module}.lora_B.weight"]


def _width(source: LoraFile, modules: dict[int, str]) -> int:
    return len(_matrices(source, next(iter(modules.values())))[1])


def _joined(source: LoraFile, modules: dict[int, str], widths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns (A [parts · rank, in], B [sum of widths, parts · rank]) of a fused projection."""
    first, rank = _matrices(source, next(iter(modules.values())))[0], source.rank
    a = torch.zeros(len(widths) * rank, first.shape[1])
    b = torch.zeros(sum(widths), len(widths) * rank)
    for place, module in modules.items():
        down, up = _matrices(source, module)
        if len(up) != widths[place]:
            raise ValueError(
                f"--format kohya: diffusers reads single blocks of FLUX.1's own width only ({widths[place]} outputs), "
                f"{module} has {len(up)}"
            )
        start = sum(widths[:place])
        a[place * rank : (place + 1) * rank] = down
        b[start : start + len(up), place * rank : (place + 1) * rank] = up
    return a, b


def _entry(name: str, down: Tensor, up: Tensor, alpha: float) -> dict[str, Tensor]:
    weights = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    return {**weights, f"{name}.alpha": torch.tensor(float(alpha))}
