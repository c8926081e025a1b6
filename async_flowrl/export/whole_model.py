"""Writes the base model with what was trained in its weights, for `from_pretrained`.

With a LoRA the weights are W + alpha / rank · B A: the model's files are copied, and the adapted matrices are
overwritten in the copies one by one. Only one matrix at a time is in memory, however large the model is. With
tune=full the trained transformer takes the place of the base model's.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from async_flowrl.config.schema import ModelConfig
from async_flowrl.export.source import Source
from async_flowrl.policies import trained_file
from async_flowrl.policies.lora_file import LoraFile, modules_of
from async_flowrl.policies.registry import folder_of, resolve_model
from async_flowrl.policies.stored import StoredWeights

MERGED, TRANSFORMER = "merged", "transformer"
"""Folder that is written, and the folder of the transformer inside it."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IGNORED = ("*.bin", "*.pt", "*.ckpt", "*.msgpack", "*.h5", "*.onnx", ".cache", ".git*")

Place = tuple[Path, int, tuple[int, ...]]
"""Position of a tensor: a file, the offset of its first byte, and the tensor's shape."""


def write_merged(model: ModelConfig, lora: LoraFile, out: Path, what: str) -> Path:
    """Writes the folder `out`/merged and returns it; after an error no part of it remains.

    `what` is "pipeline" or "transformer". Raises ValueError with one sentence if the model is not found, lacks an
    adapted layer as a plain matrix, the disk is too small, or the folder exists.
    """
    target, work = out / MERGED, out / f".{MERGED}-unfinished"
    base = folder_of(resolve_model(model), "all" if what == "pipeline" else TRANSFORMER)
    places = _places(base)
    _check(places, lora, base)
    copied = base if what == "pipeline" else base / TRANSFORMER
    _check_room(target, copied.rglob("*"))
    shutil.rmtree(work, ignore_errors=True)
    try:
        destination = work if what == "pipeline" else work / TRANSFORMER
        shutil.copytree(copied, destination, ignore=shutil.ignore_patterns(*IGNORED), copy_function=shutil.copyfile)
        for module in modules_of(lora.tensors):
            file, offset, _ = places[f"{module}.weight"]
            a, b = (lora.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
            _add(work / TRANSFORMER / file.name, offset, f"{module}.weight", (b @ a) * (lora.alpha / lora.rank))
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _check_room(target: Path, copied: Iterable[Path]) -> None:
    """Makes the parent of `target`. Raises ValueError if `target` exists or the disk has no room for the files."""
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or export elsewhere")
    needed = sum(file.stat().st_size for file in copied if file.is_file())
    target.parent.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(target.parent).free):
        raise ValueError(f"{target} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free there")


def _places(base: Path) -> Mapping[str, Place]:
    """Positions of all tensors in the transformer's safetensors files, by name."""
    places: dict[str, Place] = {}
    for file in sorted(set(StoredWeights(str(base), dtype=torch.float32).sources.values())):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            places[name] = file, 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
    return places


def _check(places: Mapping[str, Place], lora: LoraFile, base: Path) -> None:
    for module in modules_of(lora.tensors):
        if f"{module}.weight" not in places:
            raise ValueError(f"the LoRA adapts {module}, of which {base / TRANSFORMER} holds no weight")
        shape = places[f"{module}.weight"][2]
        wanted = (lora.tensors[f"{module}.lora_B.weight"].shape[0], lora.tensors[f"{module}.lora_A.weight"].shape[1])
        if shape != wanted:
            raise ValueError(f"the LoRA's {module} is for a matrix of {wanted}, {base / TRANSFORMER} has {shape}")


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


def write_whole(source: Source, out: Path, what: str) -> Path:
    """Writes `out`/transformer and, for what="pipeline", everything else of the base pipeline beside it; returns the
    transformer's folder.

    Raises ValueError, one sentence, where the base model is not known or the weights are not its own, where the disk is
    too small, and where `out` holds a model already.
    """
    if source.model is None or source.whole is None:
        raise ValueError("--base is needed: SOURCE does not say which model it is for")
    target = out / TRANSFORMER
    model = resolve_model(source.model)
    base = folder_of(model, "all" if what == "pipeline" else TRANSFORMER) / TRANSFORMER
    copied = [each for each in base.parent.iterdir() if each != base] if what == "pipeline" else []
    _check_room(target, (file for each in (base, *copied) for file in (each, *each.rglob("*"))))
    ignore = shutil.ignore_patterns(*IGNORED)
    for each in copied:
        if each.is_dir() and each.name not in ignore(str(base.parent), [each.name]):
            shutil.copytree(each, out / each.name, ignore=ignore, copy_function=shutil.copyfile, dirs_exist_ok=True)
        elif each.is_file() and each.suffix == ".json":
            shutil.copyfile(each, out / each.name)
    return trained_file.save_whole(target, source.whole, model)
