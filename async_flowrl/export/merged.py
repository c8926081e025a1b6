"""Writes the base model with the LoRA merged into its weights, W + alpha / rank · B A, for `from_pretrained`.

The model's files are copied, and the adapted matrices are overwritten in the copies one by one. Only one matrix at a
time is in memory, however large the model is.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.download import download
from async_flowrl.policies.lora_file import LoraFile, modules_of
from async_flowrl.policies.registry import resolve_model

MERGED, TRANSFORMER = "merged", "transformer"
"""Folder that is written, and the folder of the transformer inside it."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = ("*.bin", "*.pt", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", ".cache", ".git*")


@dataclass(frozen=True)
class _Place:
    """Position of a matrix: a file and the offset of its first byte."""

    file: Path
    offset: int


def write_merged(model: ModelConfig, lora: LoraFile, out: Path, what: str) -> Path:
    """Writes the folder `out`/merged and returns it; after an error no part of it remains.

    `what` is "pipeline" or "transformer". Raises ValueError with one sentence if the model is not found, lacks an
    adapted layer as a plain matrix, the disk is too small, or the folder exists.
    """
    target, work = out / MERGED, out / f".{MERGED}-unfinished"
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or export elsewhere")
    base = _folder(model, what)
    places = _places(base / TRANSFORMER)
    _check(places, lora, base)
    copied = base if what == "pipeline" else base / TRANSFORMER
    needed = sum(file.stat().st_size for file in copied.rglob("*") if file.is_file())
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise ValueError(f"{target} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free there")
    shutil.rmtree(work, ignore_errors=True)
    try:
        destination = work if what == "pipeline" else work / TRANSFORMER
        shutil.copytree(copied, destination, ignore=shutil.ignore_patterns(*IGNORED), copy_function=shutil.copyfile)
        for module in modules_of(lora.tensors):
            place = places[f"{module}.weight"]
            _add(work / TRANSFORMER / place.file.name, place.offset, f"{module}.weight", _update(lora, module))
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _folder(model: ModelConfig, what: str) -> Path:
    resolved = resolve_model(model)
    if resolved.revision is None:
        return Path(resolved.path)
    return download(resolved.path, resolved.revision, "all" if what == "pipeline" else "transformer")


def _places(folder: Path) -> Mapping[str, _Place]:
    """Positions of all tensors in the transformer's safetensors files, by name."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = [folder / "diffusion_pytorch_model.safetensors"]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"--merged needs safetensors files of the transformer, {folder} lacks {missing[0]}")
    places = {}
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        places.update({name: _Place(file, 8 + length + entry["data_offsets"][0]) for name, entry in header.items()})
    return places


def _check(places: Mapping[str, _Place], lora: LoraFile, base: Path) -> None:
    for module in modules_of(lora.tensors):
        place = places.get(f"{module}.weight")
        if place is None:
            raise ValueError(f"the LoRA adapts {module}, of which {base / TRANSFORMER} holds no weight")
        with safe_open(place.file, framework="pt") as opened:
            shape = tuple(opened.get_slice(f"{module}.weight").get_shape())
        wanted = (
            lora.tensors[f"{module}.lora_B.weight"].shape[0],
            lora.tensors[f"{module}.lora_A.weight"].shape[1],
        )
        if shape != wanted:
            raise ValueError(f"the LoRA's {module} is for a matrix of {wanted}, {base / TRANSFORMER} has {shape}")


def _update(lora: LoraFile, module: str) -> Tensor:
    """Returns alpha / rank · B A, float32 [out, in]."""
    a, b = lora.tensors[f"{module}.lora_A.weight"].float(), lora.tensors[f"{module}.lora_B.weight"].float()
    return (b @ a) * (lora.alpha / lora.rank)


def _add(file: Path, offset: int, name: str, update: Tensor) -> None:
    """Adds `update` to one matrix in its file: summed in float32, then rounded once to the matrix's dtype."""
    with safe_open(file, framework="pt") as opened:
        weight: Tensor = opened.get_tensor(name)
    if weight.dtype not in _DTYPES:
        raise ValueError(f"--merged adds to float32, bfloat16 and float16 weights, {name} is {weight.dtype}")
    merged = (weight.float() + update).to(weight.dtype).contiguous()
    with file.open("r+b") as writable:
        writable.seek(offset)
        writable.write(merged.view(torch.uint8).numpy().tobytes())
