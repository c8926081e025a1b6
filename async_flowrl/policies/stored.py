"""A model's files without the model: the configurations of its parts, and names and tensors of the transformer."""

import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from async_flowrl.config.error_text import did_you_mean, first_line
from async_flowrl.config.hub import download, folder_here, hub_file
from async_flowrl.transfers import settle

FOLDER = "transformer"
# Folders of the networks of a model with two experts, after which its tensors are named: transformer_2.proj_out.bias.
EXPERTS = (FOLDER, "transformer_2")
# The transformer's weights file; the names of several files, and of their index, are derived from it.
FILE = "diffusion_pytorch_model.safetensors"
# In the names of files that only together have all tensors of a part, e.g. model-00001-of-00002.safetensors.
_ONE_OF_SEVERAL = re.compile(r"-\d+-of-\d+\.")


class Weights(Mapping[str, Tensor]):
    """The tensors of a network by name; a subclass makes each at each access, from its source."""

    sources: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


@contextmanager
def on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Context manager: parameters of this thread's new modules are on the meta device, in `dtype` by default."""
    before, thread = torch.get_default_dtype(), threading.get_ident()

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> Any:  # torch declares None
        if threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    torch.set_default_dtype(dtype)
    hook = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        hook.remove()
        torch.set_default_dtype(before)


def file_states(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Returns path, size and time of the last change (ns) of each file."""
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def fill(network: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Gives a frozen network on the meta device its weights and saved buffers, one at a time, settled on `device`."""
    for name in network.state_dict():
        place, _, leaf = name.rpartition(".")
        module, tensor = network.get_submodule(place), weights[name].to(device)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor
    settle(network, device)


class StoredWeights(Weights):
    """The tensors of safetensors files by name, each read from its file, and cast to `dtype`, at each access.

    Those with a part of their name in `in_float32` become float32. `path` is a local diffusers folder, or a hub name
    at `revision`; of several `folders` in it, names begin with the folder. Raises ValueError without safetensors files.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        revision: str | None = None,
        folders: Sequence[str] = (FOLDER,),
        in_float32: frozenset[str] = frozenset(),
    ) -> None:
        root = Path(path) if revision is None else download(path, revision, "transformer")
        self.sources = {
            prefix + name: file
            for folder, prefix in prefixes(folders).items()
            for file in weights_files(root / folder)
            for name in elements_in(file)
        }
        self._dtype, self._in_float32, self._prefixed = dtype, in_float32, len(folders) > 1

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.read(name)
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype if self._in_float32.isdisjoint(name.split(".")) else torch.float32)

    def read(self, name: str) -> Tensor:
        """Returns a tensor as it is in its file."""
        with safe_open(self.sources[name], framework="pt") as file:
            return cast("Tensor", file.get_tensor(name.partition(".")[2] if self._prefixed else name))


def weights_files(folder: Path) -> list[Path]:
    """Returns the weights files of a local transformer folder. Raises ValueError if one of them is missing."""
    index = folder / f"{FILE}.index.json"
    files = [folder / name for name in sorted(indexed(index) if index.is_file() else {FILE})]
    if missing := [file.name for file in files if not file.is_file()]:
        variants = sorted(file.name for file in folder.glob("*.*.safetensors"))
        only = f"; of variants such as {variants[0]} none is read" if variants else ""
        raise ValueError(f"there is no {folder.name}/{missing[0]} in {folder.parent}{only}, and no other kind of file")
    return files


def indexed(index: Path) -> set[str]:
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())


def check_fits(
    where: object, tensors: Mapping[str, Tensor], model: Mapping[str, Tensor], *, all_of: bool, what: str = "the model"
) -> None:
    """Raises ValueError, `where` does not fit `what`, for another name or shape; `all_of`: or a missing tensor."""
    extra, missing = sorted(tensors.keys() - model.keys()), sorted(model.keys() - tensors.keys()) if all_of else []
    if missing or extra:
        first = f"lacks {missing[0]}" if missing else f"has {extra[0]}, which is unknown there"
        counts = f"({len(missing)} tensors missing, {len(extra)} too many)"
        raise ValueError(f"{where} does not fit {what}: it {first} {counts}")
    for name in sorted(tensors):
        if tensors[name].shape != model[name].shape:
            shapes = f"{list(tensors[name].shape)}, expected {list(model[name].shape)}"
            raise ValueError(f"{where} does not fit {what}: {name} is {shapes}")


@dataclass(frozen=True)
class StoredElements:
    """Numbers of elements in the safetensors files of a model; those of the transformer by name of the tensor."""

    transformer: Mapping[str, int]
    text_encoders: int
    vae: int


def stored_elements(path: str, revision: str | None = None) -> StoredElements:
    """Counts the elements in a model's files by their headers; nothing is downloaded.

    Raises the errors of StoredWeights, and of huggingface_hub for missing files of the transformer.
    """
    root = Path(path) if revision is None else folder_here(path, revision)
    transformer = {
        prefix + name: count
        for folder, prefix in prefixes(network_folders(path, revision)).items()
        for file in weights_files(root / folder)
        for name, count in elements_in(file).items()
    }
    text, vae = (sum(map(_elements_of_part, root.glob(part))) for part in ("text_encoder*", "vae"))
    return StoredElements(transformer, text, vae)


def _elements_of_part(folder: Path) -> int:
    """Returns the elements in a folder, without second copies: in another precision, or beside a whole file."""
    files = [file for file in folder.glob("*.safetensors") if file.name.count(".") == 1]
    whole = [file for file in files if not _ONE_OF_SEVERAL.search(file.name)]
    return sum(count for file in whole or files for count in elements_in(file).values())


def elements_in(file: Path) -> dict[str, int]:
    """Returns tensor name → number of its elements, by the header of a safetensors file."""
    with safe_open(file, framework="pt") as opened:
        return {name: math.prod(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def prefixes(folders: Sequence[str]) -> dict[str, str]:
    """Returns folder → beginning of the names of its tensors, which is empty for a single folder."""
    return {folder: f"{folder}." if len(folders) > 1 else "" for folder in folders}


def network_folders(path: str, revision: str | None = None) -> tuple[str, ...]:
    return (FOLDER,) if boundary_ratio(path, revision) is None else EXPERTS


def boundary_ratio(path: str, revision: str | None = None) -> float | None:
    """Returns the noise level below which `transformer_2` computes; None for a model with one network."""
    ratio = json_file(path, "model_index.json", revision).get("boundary_ratio")
    return None if ratio is None else float(ratio)


def configuration(path: str, part: str, revision: str | None = None) -> dict[str, Any]:
    """Returns config.json of one part of the model, e.g. "vae". Raises ValueError if the file cannot be read."""
    return json_file(path, f"{part}/config.json", revision)


def json_file(path: str, name: str, revision: str | None = None) -> dict[str, Any]:
    try:
        file = Path(path) / name if revision is None else hub_file(path, name, revision)
        return cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} of model.path {path} cannot be read: {first_line(error)}") from error


def trained_names(names: Mapping[str, object], freeze: Sequence[str]) -> list[str]:
    """Returns the sorted names that match no pattern of `freeze`. ValueError if one has no match, or all have one."""
    frozen: set[str] = set()
    for pattern in freeze:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            hint = did_you_mean(pattern, sorted(names), shown=str)
            raise ValueError(
                f"full.freeze: {pattern!r} matches no parameter of the model, e.g. {min(names)}{hint}; "
                "* stands for anything: 'pos_embed.*'"
            )
        frozen |= matched
    if not names.keys() - frozen:
        raise ValueError(f"full.freeze={list(freeze)} freezes all {len(names)} parameters: nothing is left to train")
    return sorted(names.keys() - frozen)
