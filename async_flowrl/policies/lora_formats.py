"""LoRA files with the layer names of ComfyUI and of kohya's trainers; `async-flowrl export --format` writes them.

Each file is read back with diffusers before it gets its name. ComfyUI's names are those of its comfy/lora.py, kohya's
those of sd-scripts (FLUX.1) and of musubi-tuner (Qwen-Image, Z-Image). All files have alpha = rank.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.error_text import first_line
from async_flowrl.config.models import PIPELINES
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora_file import COMFYUI_PREFIX, PREFIX, LoraFile, modules_of

# LoRA → tensors with the names of a format.
Convert = Callable[[LoraFile], dict[str, Tensor]]
# Largest relative difference that `compare` accepts, for the rounding of alpha / rank in float32.
_TOLERANCE = 1e-5


def write(path: Path, source: LoraFile, *, family: str, form: str, base: str | None = None) -> Path:
    """Writes a LoRA to `path` in the format `form` (a key of FORMS), once diffusers has read it back; returns `path`.

    Raises ValueError, one sentence, if the format has no name for the family or a layer, or if the layers that
    diffusers reads compute something else. After an error there is no new file, and an earlier one at `path` stays.
    """
    tensors = converter(form, family)(source.with_alpha(source.rank))
    header = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(source.rank),
        "ss_network_alpha": str(source.rank),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as unchecked:
        written = lora_file.put(Path(unchecked) / path.name, lora_file.encoded(tensors, header, base))
        compare(source, read_back(written, family, path), path)
        written.replace(path)
    return path


def converter(form: str, family: str) -> Convert:
    """Returns the function that converts a LoRA of `family` to `form`. Raises ValueError if there is none."""
    if family not in FORMS[form]:
        families = ", ".join(sorted(FORMS[form]))
        raise ValueError(f"--format {form} is not written for {family}, only for {families}")
    return FORMS[form][family]


def read_back(path: Path, family: str, where: Path | None = None) -> LoraFile:
    """Returns the LoRA that diffusers' loader of the family reads from a file (`where` in messages), or ValueError."""
    import diffusers

    where = where or path
    kind: Any = getattr(diffusers, next(name for name, of in PIPELINES.items() if of == family))
    options = {"weight_name": path.name, "use_safetensors": True}
    try:
        if family in ("flux", "flux_kontext"):
            converted, alphas = kind.lora_state_dict(str(path.parent), return_alphas=True, **options)
        else:
            converted, alphas = kind.lora_state_dict(str(path.parent), **options), {}
    except (ValueError, RuntimeError, KeyError, AssertionError) as error:
        title = kind.__name__
        raise ValueError(f"{where}: diffusers cannot read it as a LoRA of {title}: {first_line(error)}") from error
    tensors = {key.removeprefix(PREFIX): value.float() for key, value in converted.items() if key.startswith(PREFIX)}
    if not tensors:
        first = min(converted, default="no tensor")
        raise ValueError(f"{where}: diffusers finds no layer of {kind.__name__} in it, but e.g. {first}")
    if others := sorted(set(converted) - {PREFIX + name for name in tensors}):
        raise ValueError(f"{where} adapts more than the transformer, e.g. {others[0]}; that is not supported")
    tensors = _gates_apart(tensors)
    rank = lora_file.rank_of(tensors, str(where))
    scales = {float(alpha) for alpha in (alphas or {}).values()} or {float(rank)}
    if len(scales) > 1:
        raise ValueError(f"{where} has layers of different alpha ({sorted(scales)}), which is not supported")
    return LoraFile(tensors, rank, scales.pop())


def _gates_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the LoRA with ComfyUI's fused `gate_up` of Qwen-Image 2.1 as diffusers' layers: the gate's rows first."""
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        block, fused, side = name.partition(".img_mlp.gate_up.")
        parts = {f"{block}.img_mlp.{layer}.{side}": index for index, layer in enumerate(("gate_layer", "proj"))}
        halves = tensor.chunk(2) if side == "lora_B.weight" else (tensor, tensor)
        apart |= {part: halves[index] for part, index in parts.items()} if fused else {name: tensor}
    return apart


def compare(source: LoraFile, written: LoraFile, where: Path) -> None:
    """Raises ValueError if two LoRAs compute different things; the message begins with `where`."""
    # It compares alpha / rank · B(Ax) for one random x per layer. A layer that is in one LoRA only must give zero.
    for module in sorted({*modules_of(source.tensors), *modules_of(written.tensors)}):
        one, two = _response(source, module), _response(written, module)
        if not float((one - two).abs().max()) <= _TOLERANCE * float(one.abs().max()):
            raise ValueError(f"{where}: read back by diffusers, layer {module} is not the one that was written")


def _response(adapter: LoraFile, module: str) -> Tensor:
    """Returns what the layer adds for a random x, float64; a single 0 if the LoRA does not adapt it."""
    a = adapter.tensors.get(f"{module}.lora_A.weight")
    if a is None:
        return torch.zeros(1, dtype=torch.float64)
    drawn = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = adapter.tensors[f"{module}.lora_B.weight"]
    return adapter.alpha / adapter.rank * (b.double() @ (a.double() @ drawn))


def _prefixed(prefix: str) -> Convert:
    def convert(source: LoraFile) -> dict[str, Tensor]:
        alphas = {f"{module}.alpha": torch.tensor(source.alpha) for module in modules_of(source.tensors)}
        return {prefix + name: tensor for name, tensor in (source.tensors | alphas).items()}

    return convert


def _plain(source: LoraFile) -> dict[str, Tensor]:
    """Returns the tensors under diffusers' names, without alpha: some of its loaders refuse it or move the prefix."""
    return {PREFIX + name: tensor for name, tensor in source.tensors.items()}


def _flattened(source: LoraFile) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for module in modules_of(source.tensors):
        tensors |= _entry("lora_unet_" + module.replace(".", "_"), *_matrices(source, module), source.alpha)
    return tensors


# Width of FLUX.1. diffusers splits `linear1` of a single block into 3072 each for q, k, v, and 12288 for the MLP.
_FLUX_WIDTH = 3072
_DOUBLE, _SINGLE = re.compile(r"transformer_blocks\.(\d+)\.(.+)"), re.compile(r"single_transformer_blocks\.(\d+)\.(.+)")
# diffusers' layer of a double block, and of a single one → (fused layer of sd-scripts, position in it).
_FUSED = {
    **{f"attn.to_{name}": ("img_attn_qkv", place) for place, name in enumerate("qkv")},
    **{f"attn.add_{name}_proj": ("txt_attn_qkv", place) for place, name in enumerate("qkv")},
}
_FUSED_SINGLE = {
    **{f"attn.to_{name}": ("linear1", place) for place, name in enumerate("qkv")},
    "proj_mlp": ("linear1", 3),
}
# diffusers' layer of a double block, and of a single one → the same layer in sd-scripts.
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
_NAMES_SINGLE = {"proj_out": "linear2", "norm.linear": "modulation_lin"}


def _kohya_flux(source: LoraFile) -> dict[str, Tensor]:
    # sd-scripts' network has one fused projection where diffusers has several, e.g. q, k and v. Their LoRAs become one
    # LoRA with the sum of their ranks: the A are stacked, the B are block-diagonal, and zeros stand for a projection
    # without LoRA. Alpha is multiplied by the same factor as the rank, so alpha / rank stays.
    tensors: dict[str, Tensor] = {}
    fused: dict[str, dict[int, str]] = {}
    for module in modules_of(source.tensors):
        block, layer, place = _found(module)
        if place is None:
            tensors |= _entry(f"{block}_{layer}", *_matrices(source, module), source.alpha)
        else:
            fused.setdefault(f"{block}_{layer}", {})[place] = module
    for name, modules in fused.items():
        _, up = _matrices(source, next(iter(modules.values())))
        widths = [_FLUX_WIDTH] * 3 + [4 * _FLUX_WIDTH] if name.endswith("linear1") else [len(up)] * 3
        tensors |= _entry(name, *_joined(source, modules, widths), source.alpha * len(widths))
    return tensors


def _found(module: str) -> tuple[str, str, int | None]:
    single, double = _SINGLE.fullmatch(module), _DOUBLE.fullmatch(module)
    names, groups, kind = (_NAMES_SINGLE, _FUSED_SINGLE, "single") if single else (_NAMES, _FUSED, "double")
    if match := single or double:
        if match[2] in names:
            return f"lora_unet_{kind}_blocks_{match[1]}", names[match[2]], None
        if match[2] in groups:
            return f"lora_unet_{kind}_blocks_{match[1]}", *groups[match[2]]
    raise ValueError(f"--format kohya has no name for FLUX.1's layer {module}")


def _matrices(source: LoraFile, module: str) -> tuple[Tensor, Tensor]:
    return source.tensors[f"{module}.lora_A.weight"], source.tensors[f"{module}.lora_B.weight"]


def _joined(source: LoraFile, modules: dict[int, str], widths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns (A [parts · rank, in], B [sum of widths, parts · rank]) of a fused projection."""
    first, rank = _matrices(source, next(iter(modules.values())))[0], source.rank
    a = torch.zeros(len(widths) * rank, first.shape[1])
    b = torch.zeros(sum(widths), len(widths) * rank)
    for place, module in modules.items():
        down, up = _matrices(source, module)
        if len(up) != widths[place]:
            expected = f"of FLUX.1's own width only ({widths[place]} outputs)"
            raise ValueError(f"--format kohya: diffusers reads single blocks {expected}, {module} has {len(up)}")
        start = sum(widths[:place])
        a[place * rank : (place + 1) * rank] = down
        b[start : start + len(up), place * rank : (place + 1) * rank] = up
    return a, b


def _entry(name: str, down: Tensor, up: Tensor, alpha: float) -> dict[str, Tensor]:
    weights = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    return {**weights, f"{name}.alpha": torch.tensor(float(alpha))}


# Format → family → function that converts a LoRA to tensors with the format's names.
FORMS: Mapping[str, Mapping[str, Convert]] = {
    "comfyui": {
        **dict.fromkeys(("qwen_image", "qwen_image_edit"), _prefixed(COMFYUI_PREFIX)),  # One network.
        # Under its own prefix ComfyUI knows only the fused layer `img_mlp.gate_up`; its halves have diffusers' names.
        "qwen_image_21": _plain,
        "z_image": _prefixed(COMFYUI_PREFIX),
        **dict.fromkeys(("flux", "flux_kontext"), _prefixed(PREFIX)),
        "sd3": _plain,
    },
    "kohya": {
        **dict.fromkeys(("qwen_image", "qwen_image_edit", "z_image"), _flattened),
        **dict.fromkeys(("flux", "flux_kontext"), _kohya_flux),
    },
}
