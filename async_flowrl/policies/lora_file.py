"""LoRA files: written so that diffusers' `pipe.load_lora_weights(folder)` and PEFT's
`PeftModel.from_pretrained(transformer, folder)` reproduce the trained model; read from either.

Without adapter metadata diffusers takes alpha = rank, silently scaling the adapter wrongly; so it is always written.
Both formats may lie in one folder: of several safetensors files diffusers takes `pytorch_lora_weights.safetensors`.
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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor

from async_flowrl.config.schema import LoraConfig

FILE_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX, PEFT_PREFIX = "transformer.", "base_model.model."
BASE_MODEL = "base_model"
"""Key of a file's header under which the base model's hub name stands, where it has one."""
_METADATA = "lora_adapter_metadata"
_BASE_KEYS = (BASE_MODEL, "base_model_name_or_path", "ss_sd_model_name")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN_LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": None,
    "inference_mode": True,
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}
"""`adapter_config.json` of an adapter without any of LoRA's variants, in the names of PEFT's `LoraConfig`, which has
defaults for what is missing. Written without PEFT, whose import costs a process three seconds."""
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


def save(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Both formats in one folder, and the path of diffusers' file: it is the one that `load_lora_weights` takes."""
    write_peft(folder, tensors, alpha=alpha, base=base)
    return write(folder, tensors, alpha=alpha, base=base)


def write(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Writes `pytorch_lora_weights.safetensors` with its metadata, float32, all or nothing; returns the file.

    The rank is that of the tensors. `base` is what the model was loaded from; it is recorded where it is a hub name.
    The same arguments give the same bytes.
    """
    rank = rank_of(tensors, str(folder))
    metadata = {f"{PREFIX}r": rank, f"{PREFIX}lora_alpha": alpha, f"{PREFIX}target_modules": modules_of(tensors)}
    metadata |= {f"{PREFIX}lora_dropout": 0.0, f"{PREFIX}bias": "none"}
    header = {_METADATA: json.dumps(metadata, sort_keys=True)}
    return put(folder / FILE_NAME, encoded({PREFIX + name: tensor for name, tensor in tensors.items()}, header, base))


def write_peft(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Writes `adapter_model.safetensors`, float32, and `adapter_config.json`; returns the configuration's file.

    `PeftModel.from_pretrained(transformer, folder)` loads them. The same arguments give the same bytes.
    """
    described = _PLAIN_LORA | {
        "r": rank_of(tensors, str(folder)),
        "lora_alpha": alpha,
        "target_modules": modules_of(tensors),
        "base_model_name_or_path": hub_name(base),
    }
    put(folder / PEFT_WEIGHTS, encoded({PEFT_PREFIX + name: tensor for name, tensor in tensors.items()}, {}, base))
    return put(folder / PEFT_CONFIG, (json.dumps(described, indent=2, sort_keys=True) + "\n").encode())


def modules_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """The adapted layers, sorted."""
    return sorted({module_name(name) for name in tensors})


def hub_name(base: str | None) -> str | None:
    """`base` where it names a model of the hub; a folder of this machine means nothing elsewhere."""
    known = base is not None and _HUB_NAME.fullmatch(base) and not Path(base).expanduser().exists()
    return base if known else None


def base_of(path: Path) -> str | None:
    """The hub name of the model that a LoRA file or folder says it was made for; None where it does not say."""
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else [folder / FILE_NAME, *sorted(folder.glob("*.safetensors"))]
    described = [header_of(file) for file in files if file.suffix == ".safetensors" and file.is_file()]
    if (folder / PEFT_CONFIG).is_file():
        described.append(json.loads((folder / PEFT_CONFIG).read_text()))
    named = (hub_name(each.get(key)) for each in described for key in _BASE_KEYS)
    return next(filter(None, named), None)


def header_of(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises ValueError where it is none."""
    try:
        with safe_open(file, framework="pt") as opened:
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error


def encoded(tensors: Mapping[str, Tensor], header: Mapping[str, str], base: str | None) -> bytes:
    """A safetensors file of float32 tensors, sorted by name."""
    named = {BASE_MODEL: name} if (name := hub_name(base)) else {}
    payload = {name: tensors[name].detach().to("cpu", torch.float32).contiguous().clone() for name in sorted(tensors)}
    return _ordered(save_tensors(payload, {"format": "pt", **named, **header}))


def put(file: Path, content: bytes) -> Path:
    """Writes a file, all or nothing, and makes its folder where there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return file


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
        if (path / PEFT_WEIGHTS).is_file() and (path / PEFT_CONFIG).is_file():
            return _read_peft(path)
        raise ValueError(f"lora.path {path} holds neither {FILE_NAME} (diffusers) nor {PEFT_CONFIG} (PEFT)")
    if path.suffix != ".safetensors":
        raise ValueError(f"lora.path {path} is not a .safetensors file; pickled weights are not read")
    if path.name == PEFT_WEIGHTS and (path.parent / PEFT_CONFIG).is_file():
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
    tensors, header = _load(path, [PREFIX])
    rank = rank_of(tensors, str(path))
    alpha = float(rank)
    if _METADATA in header:
        metadata = {key.removeprefix(PREFIX): value for key, value in json.loads(header[_METADATA]).items()}
        _check(metadata, str(path))
        alpha = float(metadata["lora_alpha"])
    return LoraFile(tensors, rank, alpha)


def _read_peft(folder: Path) -> LoraFile:
    config = json.loads((folder / PEFT_CONFIG).read_text())
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder} holds a PEFT adapter of type {config.get('peft_type')}, only LORA can be read")
    _check(config, str(folder))
    tensors, _ = _load(folder / PEFT_WEIGHTS, [PEFT_PREFIX, PREFIX])
    return LoraFile(tensors, rank_of(tensors, str(folder)), float(config["lora_alpha"]))


def _load(path: Path, prefixes: list[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    header, tensors = header_of(path), {}
    with safe_open(path, framework="pt") as file:
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


def rank_of(tensors: Mapping[str, Tensor], where: str) -> int:
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
