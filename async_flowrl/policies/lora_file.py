"""LoRA files: written so that diffusers' `pipe.load_lora_weights(folder)` reproduces the trained model; read from
diffusers and PEFT.

Without adapter metadata diffusers takes alpha = rank, silently scaling the adapter wrongly; so it is always written.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from async_flowrl.config.schema import LoraConfig

FILE_NAME = "pytorch_lora_weights.safetensors"
_PEFT_WEIGHTS, _PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_METADATA = "lora_adapter_metadata"
_PREFIX = "transformer."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save")


@dataclass(frozen=True)
class LoraFile:
    """`tensors` by layout name, e.g. transformer_blocks.0.attn.to_q.lora_A.weight; scaling is alpha / rank."""

    tensors: dict[str, Tensor]
    rank: int
    alpha: float


def module_name(tensor_name: str) -> str:
    """The adapted layer a layout name belongs to."""
    match = _TENSOR.fullmatch(tensor_name)
    if match is None:
        raise ValueError(f"{tensor_name!r} is not the name of a LoRA tensor (<module>.lora_A.weight or .lora_B.weight)")
    return match["module"]


def write(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float) -> Path:
    """Writes `pytorch_lora_weights.safetensors` with its metadata, float32, all or nothing; returns the file.

    The rank is that of the tensors. The same tensors give the same bytes.
    """
    rank = _rank(tensors, str(folder))
    modules = sorted({module_name(name) for name in tensors})
    metadata = {f"{_PREFIX}r": rank, f"{_PREFIX}lora_alpha": alpha, f"{_PREFIX}target_modules": modules}
    metadata |= {f"{_PREFIX}lora_dropout": 0.0, f"{_PREFIX}bias": "none"}
    payload = {
        _PREFIX + name: tensors[name].detach().to("cpu", torch.float32).contiguous().clone() for name in sorted(tensors)
    }
    content = _ordered(save(payload, {"format": "pt", _METADATA: json.dumps(metadata, sort_keys=True)}))
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{FILE_NAME}-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / FILE_NAME)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return folder / FILE_NAME


def _ordered(content: bytes) -> bytes:
    """The same safetensors file with its header in one order: the library writes the metadata in any."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def read(path: Path) -> LoraFile:
    """A diffusers LoRA file or folder, or a PEFT folder. Raises ValueError in one sentence on anything else."""
    if not path.exists():
        raise ValueError(f"lora.path {path} does not exist")
    if path.is_dir():
        if (path / FILE_NAME).is_file():
            return _read_diffusers(path / FILE_NAME)
        if (path / _PEFT_WEIGHTS).is_file() and (path / _PEFT_CONFIG).is_file():
            return _read_peft(path)
        raise ValueError(f"lora.path {path} holds neither {FILE_NAME} (diffusers) nor {_PEFT_CONFIG} (PEFT)")
    if path.suffix != ".safetensors":
        raise ValueError(f"lora.path {path} is not a .safetensors file; pickled weights are not read")
    if path.name == _PEFT_WEIGHTS and (path.parent / _PEFT_CONFIG).is_file():
        return _read_peft(path.parent)
    return _read_diffusers(path)


def read_for(config: LoraConfig) -> LoraFile:
    """The LoRA a run starts from (`lora.path`). Raises ValueError where its rank or alpha is not the run's."""
    if config.path is None:
        raise ValueError("lora.path is not set")
    source = read(Path(config.path).expanduser())
    for what, given, wanted in (("rank", source.rank, config.rank), ("alpha", source.alpha, config.alpha)):
        if given != wanted:
            raise ValueError(
                f"lora.path {config.path} has {what} {given:g}, this run lora.{what}={wanted:g}: they must be equal"
            )
    return source


def _read_diffusers(path: Path) -> LoraFile:
    tensors, header = _load(path, [_PREFIX])
    rank = _rank(tensors, str(path))
    alpha = float(rank)
    if _METADATA in header:
        metadata = {key.removeprefix(_PREFIX): value for key, value in json.loads(header[_METADATA]).items()}
        _check(metadata, str(path))
        alpha = float(metadata["lora_alpha"])
    return LoraFile(tensors, rank, alpha)


def _read_peft(folder: Path) -> LoraFile:
    config = json.loads((folder / _PEFT_CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} holds a PEFT adapter of type {config.get('peft_type')}, only LORA can be read")
    _check(config, str(folder))
    tensors, _ = _load(folder / _PEFT_WEIGHTS, ["base_model.model.", _PREFIX])
    return LoraFile(tensors, _rank(tensors, str(folder)), float(config["lora_alpha"]))


def _load(path: Path, prefixes: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {}
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        for key in file.keys():  # noqa: SIM118
            name = key
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            name = name.replace(".default.weight", ".weight")
            if not _TENSOR.fullmatch(name):
                raise ValueError(f"{path} holds {key!r}, not a diffusers or PEFT LoRA tensor of the transformer")
            tensors[name] = file.get_tensor(key).to(torch.float32)
    return tensors, header


def _check(config: Mapping[str, Any], where: str) -> None:
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"{where} uses {key}={config[key]!r}, which is not supported; plain LoRA is")


def _rank(tensors: Mapping[str, Tensor], where: str) -> int:
    """The one rank of all tensors; every layer must have both its A [rank, in] and its B [out, rank]."""
    if not tensors:
        raise ValueError(f"{where}: no LoRA tensors")
    ranks = set()
    for module in sorted({module_name(name) for name in tensors}):
        a, b = tensors.get(f"{module}.lora_A.weight"), tensors.get(f"{module}.lora_B.weight")
        if a is None or b is None:
            raise ValueError(f"{where}: {module} has no lora_{'A' if a is None else 'B'}")
        ranks |= {a.shape[0], b.shape[1]}
    if len(ranks) != 1:
        raise ValueError(f"{where}: layers of different rank ({sorted(ranks)}) are not supported")
    return int(ranks.pop())
