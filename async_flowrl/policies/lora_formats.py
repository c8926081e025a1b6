"""LoRA files of other programs: the key names of ComfyUI and of kohya's trainers, written and checked.

ComfyUI (comfy/lora.py) knows Qwen-Image's and Z-Image's layers as `diffusion_model.<diffusers' name>`, FLUX.1's and
Stable Diffusion 3's as `transformer.<diffusers' name>`, and takes alpha from a tensor beside them; without one it
scales by 1.
kohya's names are those of sd-scripts (FLUX.1, whose projections are fused) and musubi-tuner (Qwen-Image, Z-Image).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.messages import first_line, unknown_name
from async_flowrl.policies import kohya_flux, lora_file
from async_flowrl.policies.lora_file import PREFIX, LoraFile
from async_flowrl.policies.registry import PIPELINES

Convert = Callable[[LoraFile], dict[str, Tensor]]
_TOLERANCE = 1e-5
"""Largest relative difference that rounding of alpha / rank in float32 may make."""


def write(path: Path, source: LoraFile, *, family: str, form: str, base: str | None = None) -> Path:
    """Writes `path` with the key names of `form`, and reads it back with diffusers' own loader of the family.

    Raises ValueError, one sentence, and leaves no file, for a family or layers that the form has no names for, and
    where what diffusers reads is not the same adapter.
    """
    header = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(source.rank),
        "ss_network_alpha": f"{source.alpha:g}",
    }
    tensors = converter(form, family)(source)
    lora_file.put(path, lora_file.encoded(tensors, header, base))
    try:
        compare(source, read_back(path, family), path)
    except ValueError:
        path.unlink()
        raise
    return path


def converter(form: str, family: str) -> Convert:
    """What renames tensors. Raises ValueError where the form has none for the family."""
    if form not in FORMS:
        raise ValueError(unknown_name("--format", form, FORMS))
    if family not in FORMS[form]:
        known = ", ".join(sorted(FORMS[form]))
        raise ValueError(
            f"--format {form} is not there for {family}: diffusers converts its names back for {known} only, so what "
            "was written could not be checked"
        )
    return FORMS[form][family]


def read_back(path: Path, family: str) -> LoraFile:
    """The adapter as diffusers' loader of the family understands a file. Raises ValueError, one sentence."""
    import diffusers

    kind: Any = getattr(diffusers, next(name for name, of in PIPELINES.items() if of == family))
    options = {"weight_name": path.name, "use_safetensors": True}
    try:
        if family == "flux":
            converted, alphas = kind.lora_state_dict(str(path.parent), return_alphas=True, **options)
        else:
            converted, alphas = kind.lora_state_dict(str(path.parent), **options), {}
    except (ValueError, RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(
            f"{path}: diffusers cannot read it as a LoRA of {kind.__name__}: {first_line(error)}"
        ) from error
    tensors = {key.removeprefix(PREFIX): value.float() for key, value in converted.items() if key.startswith(PREFIX)}
    if not tensors:
        raise ValueError(f"{path}: diffusers finds no layer of {kind.__name__} in it; a name is {min(converted)}")
    if strange := sorted(set(converted) - {PREFIX + name for name in tensors}):
        raise ValueError(f"{path} adapts more than the transformer, e.g. {strange[0]}; that is not supported")
    rank = lora_file.rank_of(tensors, str(path))
    scales = {float(alpha) for alpha in (alphas or {}).values()} or {float(rank)}
    if len(scales) > 1:
        raise ValueError(f"{path} has layers of different alpha ({sorted(scales)}), which is not supported")
    return LoraFile(tensors, rank, scales.pop())


def compare(wanted: LoraFile, found: LoraFile, where: Path) -> None:
    """Raises ValueError where two adapters differ: alpha / rank · B(Ax) of a drawn x, layer by layer.

    A layer that one of them lacks must be zero in the other.
    """
    modules = sorted({*lora_file.modules_of(wanted.tensors), *lora_file.modules_of(found.tensors)})
    for module in modules:
        one, two = _response(wanted, module), _response(found, module)
        if one is None or two is None:
            same = not bool((two if one is None else one).any())  # type: ignore[union-attr]
        else:
            same = float((one - two).abs().max()) <= _TOLERANCE * float(one.abs().max())
        if not same:
            raise ValueError(f"{where}: read back by diffusers, layer {module} is not the one that was written")


def _response(adapter: LoraFile, module: str) -> Tensor | None:
    a = adapter.tensors.get(f"{module}.lora_A.weight")
    if a is None:
        return None
    drawn = torch.randn(a.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    b = adapter.tensors[f"{module}.lora_B.weight"]
    return adapter.alpha / adapter.rank * (b.double() @ (a.double() @ drawn))


def _alphas(source: LoraFile, names: Sequence[str]) -> dict[str, Tensor]:
    return {f"{name}.alpha": torch.tensor(source.alpha) for name in names}


def _prefixed(prefix: str) -> Convert:
    def convert(source: LoraFile) -> dict[str, Tensor]:
        modules = [prefix + module for module in lora_file.modules_of(source.tensors)]
        return {prefix + name: tensor for name, tensor in source.tensors.items()} | _alphas(source, modules)

    return convert


def _scaled(source: LoraFile) -> dict[str, Tensor]:
    """diffusers' names without alpha, which its loader of Stable Diffusion 3 refuses: B times alpha / rank instead."""
    scale = source.alpha / source.rank
    return {PREFIX + name: t * scale if name.endswith("lora_B.weight") else t for name, t in source.tensors.items()}


def _flattened(source: LoraFile) -> dict[str, Tensor]:
    """`lora_unet_<name with underscores>.lora_down.weight`, `.lora_up.weight` and `.alpha`."""
    tensors: dict[str, Tensor] = {}
    for module in lora_file.modules_of(source.tensors):
        name = "lora_unet_" + module.replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = source.tensors[f"{module}.lora_A.weight"]
        tensors[f"{name}.lora_up.weight"] = source.tensors[f"{module}.lora_B.weight"]
        tensors[f"{name}.alpha"] = torch.tensor(source.alpha)
    return tensors


FORMS: Mapping[str, Mapping[str, Convert]] = {
    "comfyui": {
        "qwen_image": _prefixed("diffusion_model."),
        "z_image": _prefixed("diffusion_model."),
        "flux": _prefixed(PREFIX),
        "sd3": _scaled,
    },
    "kohya": {"qwen_image": _flattened, "z_image": _flattened, "flux": kohya_flux.convert},
}
"""Form → family → what renames the tensors."""
