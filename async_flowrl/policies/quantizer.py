"""The quantised base of a run (`model.quantize`): made once per node on the CPU, and the same bits wherever it is read.

All processes load the codes and scales of one kept copy. So what samples, what trains, and the digest of the base are
of the same numbers, and no device ever holds the weights that they were made of.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save
from torch import Tensor, nn

from async_flowrl.config.paths import cache_dir, replace_file
from async_flowrl.policies.quantized_layer import FORMATS, quantizable, quantize
from async_flowrl.policies.stored import FILE, FOLDER, StoredWeights, Weights, file_states, fill, on_meta
from checkpoint_engine import base_digest

logger = logging.getLogger(__name__)

# Part of the key of a kept copy; increase it when the bits change that FORMATS give, or the choice of layers.
_RECIPE = 2
# Numbers that are quantised at a time, few enough for a CPU's cache; bytes of a file of the kept copy, at least.
_AT_A_TIME, _FILE_BYTES = 1 << 20, 1 << 30
_INDEX = f"{FILE}.index.json"


@dataclass(frozen=True)
class Quantizer:
    """Says how networks and text encoders are stored on the device: keys of FORMATS, or None for as in the files."""

    base: str | None = None
    text: str | None = None
    weights: Callable[[], Mapping[str, Tensor]] = dict  # Of the network, in the format `base`, by name.

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments for a family's `load`; without any quantisation none, because others' need not know it."""
        return {"quantizer": self} if self.base or self.text else {}

    def loaded(self, structure: Callable[[], nn.Module], device: torch.device) -> nn.Module | None:
        """Returns the quantised network on `device`; None if the files' own weights are used."""
        if self.base is None:
            return None
        network = self.quantized(structure())
        fill(network, self.weights(), device)
        return network

    def quantized(self, network: nn.Module) -> nn.Module:
        """Replaces layers of a network on the meta device and returns it."""
        quantize(network, self.base)
        return network

    def text_encoders(
        self, path: str, dtype: torch.dtype, load: Callable[[], Mapping[str, Any]], device: torch.device
    ) -> dict[str, nn.Module]:
        """Returns by name the quantised text encoders of the local folder `path`, on `device`; raises as `kept`.

        `load` returns parts of the pipeline by name, the text encoders among them in host memory as in their files.
        """
        import transformers

        def write(folder: Path) -> None:
            for name, part in load().items():
                if isinstance(part, nn.Module):
                    quantize(part, self.text)
                    _write(part.state_dict(), folder / name)

        files = file_states(sorted(Path(path).glob("text_encoder*/*")))
        folder = kept([self.text, str(dtype), transformers.__version__, files], write)
        kinds, encoders = json.loads((Path(path) / "model_index.json").read_text(encoding="utf-8")), {}
        for place in sorted(folder.iterdir()):
            kind = getattr(transformers, kinds[place.name][1])
            with on_meta(dtype):
                encoder = kind(kind.config_class.from_pretrained(Path(path) / place.name))
            quantize(encoder, self.text)
            fill(encoder, KeptWeights(str(folder), dtype=dtype, folders=[place.name]), device)
            encoder.tie_weights()
            encoders[place.name] = encoder
        return encoders


class KeptWeights(StoredWeights):
    """The tensors of a folder that `kept` returned. Raises ValueError for one that is not as it was written."""

    @cached_property
    def _digests(self) -> dict[str, str]:
        index = min(self.sources.values()).parent / _INDEX
        return cast("dict[str, str]", json.loads(index.read_text(encoding="utf-8"))["digests"])

    def read(self, name: str) -> Tensor:
        tensor, file = super().read(name), self.sources[name]
        if base_digest({name: tensor}) != self._digests[name]:
            raise ValueError(f"{file} is damaged ({name}): delete {file.parent.parent}, and it is made again")
        return tensor


NOT_QUANTIZED = Quantizer()


class QuantizedWeights(Weights):
    """The tensors of a network with quantised layers by name, made at each access of those in `source`."""

    def __init__(self, source: Weights, network: nn.Module, name: str, dtype: torch.dtype) -> None:
        """`network` is not quantised, and may be on the meta device; `name` is a key of FORMATS."""
        layers = sorted(quantizable(network))
        made = {f"{layer}.{part}": layer for layer in layers for part in ("weight", "scale")}
        self.sources: dict[str, str | None] = dict.fromkeys(source) | made
        self.key = [name, str(dtype), layers]
        self._source, self._format, self._dtype = source, FORMATS[name], dtype
        self._last: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if (layer := self.sources[name]) is None:
            return self._source[name]
        if name not in self._last:
            codes, scales = self._encoded(self._source[f"{layer}.weight"])
            self._last = {f"{layer}.weight": codes, f"{layer}.scale": scales}
        return self._last[name]

    def _encoded(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = max(1, _AT_A_TIME // weight.shape[1])
        parts = [self._format.encode(some.float(), self._dtype) for some in torch.split(weight, rows)]
        codes, scales = zip(*parts, strict=True)
        return torch.cat(codes), torch.cat(scales)


def kept_base(weights: QuantizedWeights, made_of: object) -> Path:
    """Returns the folder of the node's quantised base, with a folder `transformer`; `made_of` and raises as `kept`."""
    return kept([weights.key, made_of], lambda folder: _write(weights, folder / FOLDER))


def kept(made_of: object, write: Callable[[Path], None]) -> Path:
    """Returns the folder of the node's kept copy; whoever is first fills it by `write`.

    `made_of` says what it depends on. Others wait meanwhile; a copy that was not finished is made again. Raises
    ValueError if it cannot be written.
    """
    text = json.dumps([_RECIPE, made_of], sort_keys=True)
    target = cache_dir() / "quantized" / hashlib.sha256(text.encode()).hexdigest()[:32]
    here = f".{target.name}-{platform.node()}"
    work = target.with_name(here)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_name(f"{here}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
                logger.info("weights are quantised, once on this node; they are kept in %s", target)
                with _all_cores():
                    write(work)
                _rename(work, target)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise ValueError(
            f"model.quantize keeps quantised weights in {target.parent}, where they cannot be written "
            f"({error.strerror}): make room, or set $ASYNC_FLOWRL_CACHE to another folder"
        ) from error
    return target


@contextmanager
def _all_cores() -> Iterator[None]:
    # The others on the node wait. Bits do not depend on the number of threads, as each number is computed alone.
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(weights: Mapping[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    digests: dict[str, str] = {}
    for left, name in zip(range(len(weights) - 1, -1, -1), sorted(weights), strict=True):
        tensors[name] = weights[name].clone(memory_format=torch.contiguous_format)  # Some may be tied.
        digests[name] = base_digest({name: tensors[name]})
        if left and sum(tensor.nbytes for tensor in tensors.values()) < _FILE_BYTES:
            continue
        file = FILE.replace(".", f"-{len(places):05d}.", 1)
        replace_file(folder / file, save(tensors))
        places |= dict.fromkeys(tensors, file)
        tensors = {}
    replace_file(folder / _INDEX, json.dumps({"weight_map": places, "digests": digests}))


def _rename(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:  # Another node that has the same folder was faster.
        if not target.is_dir():
            raise
        shutil.rmtree(work, ignore_errors=True)
