"""LoRA files, read and written in the formats of diffusers and of PEFT; one folder can hold both.

Files are written with alpha = rank, and B multiplied by the factor alpha / rank: not every reader takes alpha from the
metadata, e.g. ComfyUI assumes alpha = rank.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn.functional import pad

from async_flowrl.config.paths import expanded, replace_file

FILE_NAME = "pytorch_lora_weights.safetensors"
PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Prefixes of tensor names in the formats of diffusers and of PEFT; the layout name follows them.
PREFIX, PEFT_PREFIX = "transformer.", "base_model.model."
# Beginning of the layout names of a model with two experts → folder, inside that of the LoRA, with the expert's own. No
# file lies above them, because diffusers would take it in place of one of its name in a `subfolder`.
EXPERTS = {PREFIX: "transformer", "transformer_2.": "transformer_2"}
# ComfyUI's own names, which for some families are not diffusers' names with a prefix.
COMFYUI_PREFIX = "diffusion_model."
# Metadata key for the hub name of the base model.
BASE_MODEL = "base_model"
# Metadata key under which diffusers stores rank and alpha as JSON.
_METADATA = "lora_adapter_metadata"
# Keys of metadata and of adapter_config.json that may name the base model.
_BASE_KEYS = (BASE_MODEL, "base_model_name_or_path", "ss_sd_model_name")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TENSOR = re.compile(r"(?P<module>.+)\.lora_[AB]\.weight")
# Constant entries of adapter_config.json for a plain LoRA. PEFT fills in the others; its import would take seconds.
_PLAIN_LORA: dict[str, Any] = {"peft_type": "LORA", "inference_mode": True}
_UNSUPPORTED = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save")


@dataclass(frozen=True)
class LoraFile:
    """The LoRA y = Wx + (alpha / rank) · B(Ax); `tensors` are float32 by layout name, e.g. a.to_q.lora_A.weight."""

    tensors: dict[str, Tensor]
    rank: int
    alpha: float

    def with_alpha(self, alpha: float) -> "LoraFile":
        """Returns the same LoRA with another alpha: B is multiplied by the present alpha divided by that one."""
        factor = self.alpha / alpha
        tensors = {name: t * factor if name.endswith(".lora_B.weight") else t for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, alpha=alpha) if factor != 1.0 else self

    def with_rank(self, rank: int) -> "LoraFile":
        """Returns the same LoRA with a larger rank: A gets rows and B columns of zeros, alpha / rank stays."""
        more = rank - self.rank
        tensors = {n: pad(t, (0, 0, 0, more) if ".lora_A." in n else (0, more)) for n, t in self.tensors.items()}
        return LoraFile(tensors, rank, self.alpha * rank / self.rank) if more else self


def module_name(tensor_name: str) -> str:
    """Returns the adapted layer's name in a layout name. Raises ValueError if it is not that of a LoRA tensor."""
    match = _TENSOR.fullmatch(tensor_name)
    if match is None:
        raise ValueError(f"{tensor_name!r} is not the name of a LoRA tensor (<module>.lora_A.weight or .lora_B.weight)")
    return match["module"]


def by_folder(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns folder inside that of the LoRA → tensors of its file, by their names there: one, or one per expert."""
    if not any(name.startswith(tuple(EXPERTS)) for name in tensors):
        return {"": dict(tensors)}
    return {
        inside: {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for prefix, inside in EXPERTS.items()
    }


def save(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Writes both formats into `folder` and returns the path of the diffusers file.

    Of a model with two experts, each has both formats in a folder of its own; the path is the first one's.
    """
    write_peft(folder, tensors, alpha=alpha, base=base)
    return write(folder, tensors, alpha=alpha, base=base)


def write(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Writes the diffusers file `pytorch_lora_weights.safetensors` in float32, with alpha = rank; returns its path.

    `base` is `model.path`, recorded only if it is a hub name. Equal arguments give equal bytes. Raises ValueError if
    the `tensors`, by layout name, have no common rank.
    """
    rank, tensors = _unscaled(tensors, alpha, folder)
    for inside, own in by_folder(tensors).items():
        metadata = {f"{PREFIX}r": rank, f"{PREFIX}lora_alpha": rank, f"{PREFIX}target_modules": modules_of(own)}
        metadata |= {f"{PREFIX}lora_dropout": 0.0, f"{PREFIX}bias": "none"}
        header, named = {_METADATA: json.dumps(metadata, sort_keys=True)}, {PREFIX + name: own[name] for name in own}
        put(folder / inside / FILE_NAME, encoded(named, header, base))
    return weights_file(folder)


def write_peft(folder: Path, tensors: Mapping[str, Tensor], *, alpha: float, base: str | None = None) -> Path:
    """Writes PEFT's weights (float32) and config as `write` does; returns the path of the config."""
    rank, tensors = _unscaled(tensors, alpha, folder)
    config = _PLAIN_LORA | {"r": rank, "lora_alpha": rank, "base_model_name_or_path": hub_name(base)}
    for inside, own in by_folder(tensors).items():
        config |= {"target_modules": modules_of(own)}
        named = {PEFT_PREFIX + name: tensor for name, tensor in own.items()}
        put(folder / inside / PEFT_WEIGHTS, encoded(named, {}, base))
        put(folder / inside / PEFT_CONFIG, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    return folder / min(by_folder(tensors)) / PEFT_CONFIG


def _unscaled(tensors: Mapping[str, Tensor], alpha: float, where: Path) -> tuple[int, Mapping[str, Tensor]]:
    rank = rank_of(tensors, str(where))
    return rank, LoraFile(dict(tensors), rank, alpha).with_alpha(rank).tensors


def modules_of(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted({module_name(name) for name in tensors})


def hub_name(base: str | None) -> str | None:
    """Returns `base` if it is a hub name, and None for a local folder, which is useless on other machines."""
    return base if base is not None and _HUB_NAME.fullmatch(base) and not expanded(base).exists() else None


def base_of(path: Path) -> str | None:
    """Returns the hub name of the base model that a LoRA file or folder records; None if there is none."""
    file = weights_file(path)
    headers: list[Mapping[str, Any]] = [header_of(file)]
    if (config := file.with_name(PEFT_CONFIG)).is_file():
        headers.append(json.loads(config.read_text(encoding="utf-8")))
    return next(filter(None, (hub_name(header.get(key)) for header in headers for key in _BASE_KEYS)), None)


def header_of(file: Path) -> dict[str, str]:
    """Returns the metadata of a safetensors file. Raises ValueError for any other file, and for one of a DoRA."""
    try:
        with safe_open(file, framework="pt") as opened:
            if dora := [name for name in opened.keys() if "dora_scale" in name]:  # noqa: SIM118
                raise ValueError(f"{file} is a DoRA, with tensors such as {dora[0]}; only plain LoRAs are supported")
            return dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file: {error}") from error


def encoded(tensors: Mapping[str, Tensor], header: Mapping[str, str], base: str | None) -> bytes:
    """Returns the bytes of a safetensors file with the tensors as float32; `header` and the hub name are metadata."""
    base_name = {BASE_MODEL: name} if (name := hub_name(base)) else {}
    payload = {name: tensors[name].detach().to("cpu", torch.float32).contiguous().clone() for name in sorted(tensors)}
    return _ordered(save_tensors(payload, {"format": "pt", **base_name, **header}))


def put(file: Path, content: bytes) -> Path:
    """Writes a file, which is never incomplete, and creates its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, content)
    return file


def _ordered(content: bytes) -> bytes:
    """Sorts the metadata in a safetensors file, which the library writes in varying order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


def weights_file(path: Path, what: str = "LoRA") -> Path:
    """Returns the .safetensors file of a path, in messages `what`. ValueError for none, several, or pickled ones."""
    if not path.exists():
        raise ValueError(f"{what} {path} does not exist")
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{what} {path} is not a .safetensors file; pickled weights are not read")
        header_of(path)
        return path
    if named := named_files(path):
        return weights_file(named[0], what)
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        check_holder(path)
        count = f"{len(files)} .safetensors files" if files else "no .safetensors file"
        raise ValueError(f"{what} {path} holds {count}; give the file itself, or a folder with {FILE_NAME}")
    return weights_file(files[0], what)


def check_holder(folder: Path) -> None:
    """Raises ValueError, with the place of the weights, for a checkpoint, and for what holds them in a folder."""
    if (folder / "manifest.json").is_file():
        raise ValueError(f"{folder} is a checkpoint: async-flowrl export {folder} OUT writes its weights to OUT")
    if (folder / "lora" / FILE_NAME).is_file():
        raise ValueError(f"{folder} is a run; its LoRA is {folder / 'lora'}")
    if (folder / EXPERTS[PREFIX] / "config.json").is_file():
        raise ValueError(f"{folder} holds a whole transformer, {folder / EXPERTS[PREFIX]}")


def named_files(folder: Path) -> list[Path]:
    """Returns the files in a LoRA's folder, and in those of experts, that have the name of either format."""
    paths = (folder / inside / name for name in (FILE_NAME, PEFT_WEIGHTS) for inside in ("", *EXPERTS.values()))
    return [path for path in paths if path.is_file()]


def is_peft(file: Path) -> bool:
    return file.name == PEFT_WEIGHTS and (file.parent / PEFT_CONFIG).is_file()


def files_of(path: Path, what: str = "LoRA") -> dict[str, Path]:
    """Returns the files of a LoRA by the beginning of its layout names: {"": file}, or one per expert; ValueError."""
    file = weights_file(path, what)
    by_expert = {prefix: file.parent.with_name(inside) / file.name for prefix, inside in EXPERTS.items()}
    missing = [each for each in by_expert.values() if not each.is_file()]
    if file not in by_expert.values():
        return {"": file}
    if missing:
        raise ValueError(f"{what} {path} is half of one for two experts: {missing[0]} is missing")
    return by_expert


def read(path: Path, what: str = "LoRA") -> LoraFile:
    """Reads a diffusers LoRA file or folder, or a PEFT folder. Raises ValueError, one sentence, for anything else.

    The files of two experts are one LoRA: `by_folder` gives their tensors again.
    """
    parts = {prefix: _read(file) for prefix, file in files_of(path, what).items()}
    tensors = {prefix + name: tensor for prefix, part in parts.items() for name, tensor in part.tensors.items()}
    alphas = {part.alpha for part in parts.values()}
    if len(alphas) > 1:
        raise ValueError(f"{path}: experts of different alpha ({sorted(alphas)}) are not supported")
    return LoraFile(tensors, rank_of(tensors, str(path)), alphas.pop())


def _read(file: Path) -> LoraFile:
    header, prefixes, where = header_of(file), [PREFIX], str(file)
    if is_peft(file):
        prefixes, where = [PEFT_PREFIX, PREFIX], str(file.parent)
        config = json.loads(file.with_name(PEFT_CONFIG).read_text(encoding="utf-8"))
        if config.get("peft_type") != "LORA":
            raise ValueError(f"{where} holds a PEFT adapter of type {config.get('peft_type')}, only LORA can be read")
    else:
        config = {key.removeprefix(PREFIX): value for key, value in json.loads(header.get(_METADATA, "{}")).items()}
    for key in _UNSUPPORTED:
        if config.get(key):
            raise ValueError(f"{where} uses {key}={config[key]!r}, which is not supported; plain LoRA is")
    tensors = _load(file, prefixes)
    rank = rank_of(tensors, where)
    return LoraFile(tensors, rank, float(config.get("lora_alpha", rank)))


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raises ValueError, which begins with `where`, for values that are not finite."""
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{where} has values that are not finite, in {len(broken)} tensors, such as {broken[0]}")


def _load(path: Path, prefixes: list[str]) -> dict[str, Tensor]:
    tensors = {}
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118
            name = key
            for prefix in prefixes:
                name = name.removeprefix(prefix)
            name = name.replace(".default.weight", ".weight")
            if not _TENSOR.fullmatch(name) or name.startswith(COMFYUI_PREFIX):
                raise ValueError(f"{path} holds {key!r}, not a diffusers or PEFT LoRA tensor of the transformer")
            tensors[name] = file.get_tensor(key).to(torch.float32)
    return tensors


def rank_of(tensors: Mapping[str, Tensor], where: str) -> int:
    """Returns the rank of the tensors; each layer must have A [rank, in] and B [out, rank]. Raises ValueError."""
    if not tensors:
        raise ValueError(f"{where}: no LoRA tensors")
    try:
        modules = modules_of(tensors)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    ranks = set()
    for module in modules:
        a, b = tensors.get(f"{module}.lora_A.weight"), tensors.get(f"{module}.lora_B.weight")
        if a is None or b is None:
            raise ValueError(f"{where}: {module} has no lora_{'A' if a is None else 'B'}")
        ranks |= {a.shape[0], b.shape[1]}
    if len(ranks) != 1:
        raise ValueError(f"{where}: layers of different rank ({sorted(ranks)}) are not supported")
    return int(ranks.pop())
