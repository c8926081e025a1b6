"""Meaning of `model.dtype=auto`: the dtype that most bytes of the transformer's files are in, from their headers."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from safetensors import SafetensorError, safe_open

from async_flowrl.config.messages import first_line
from async_flowrl.policies.download import hub_answers, hub_file
from async_flowrl.policies.stored import FILE, FOLDER

_STORED = {"F32": "float32", "BF16": "bfloat16"}
"""Names in safetensors headers of the dtypes that a network can compute in here."""
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "F4": 4}
"""Bits per element in safetensors files; 8 for every other."""


def dtype_of_files(path: str, revision: str | None) -> str:
    """`float32` or `bfloat16`: what the transformer of a local folder, or of a hub name at `revision`, is stored in.

    Of a hub name the headers alone are read, from the local cache or over the network. Raises ValueError, one sentence,
    for files of another dtype and where no header can be read.
    """
    try:
        sizes = _local(Path(path) / FOLDER) if revision is None else _hub(path, revision)
    except (OSError, SafetensorError) as error:
        raise ValueError(_unreadable(path, first_line(error))) from error
    if not sizes:
        raise ValueError(_unreadable(path, f"there is no {FOLDER}/{FILE}"))
    found, size = sizes.most_common(1)[0]
    if found not in _STORED:
        share = size / sizes.total()
        raise ValueError(
            f"the transformer's files of model.path {path} hold {found} ({share:.0%} of their bytes), which nothing is "
            "computed in here: set model.dtype to bfloat16 or float32, into which they are then cast"
        )
    return _STORED[found]


def _unreadable(path: str, reason: str) -> str:
    return (
        f"model.dtype=auto cannot be read off the transformer's files of model.path {path}: {reason}; set model.dtype "
        "to bfloat16 or float32"
    )


def _local(folder: Path) -> Counter[str]:
    index = folder / f"{FILE}.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {FILE}
    return _sum(_header(folder / name) for name in sorted(names) if (folder / name).is_file())


def _header(file: Path) -> Counter[str]:
    """Bits by dtype."""
    bits: Counter[str] = Counter()
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            bits[tensor.get_dtype()] += math.prod(tensor.get_shape()) * _BITS.get(tensor.get_dtype(), 8)
    return bits


def _hub(path: str, revision: str) -> Counter[str]:
    """Of all files of the transformer; those that are not in the cache are asked for their first kilobytes."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    try:
        index = hub_file(path, f"{FOLDER}/{FILE}.index.json", revision)
        names = set(json.loads(index.read_text())["weight_map"].values())
    except EntryNotFoundError:
        names = {FILE}
    places = {f"{FOLDER}/{name}": try_to_load_from_cache(path, f"{FOLDER}/{name}", revision=revision) for name in names}
    return _sum(
        _header(Path(place)) if isinstance(place, str) else _remote(path, name, revision)
        for name, place in sorted(places.items())
    )


def _remote(path: str, name: str, revision: str) -> Counter[str]:
    """Raises OSError where the hub does not give the header."""
    from huggingface_hub import parse_safetensors_file_metadata
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, SafetensorsParsingError

    if not hub_answers():
        raise OSError(f"{name} is not in the local cache, and the hub cannot be reached")
    # Among its bases is the HTTP library's own error, which the hub's client lets through where nobody answers.
    known = (*HfHubHTTPError.__bases__, EntryNotFoundError, SafetensorsParsingError)
    try:
        header = parse_safetensors_file_metadata(path, name, revision=revision)
    except cast("tuple[type[Exception], ...]", known) as error:
        raise OSError(f"{name}: {first_line(error)}") from error
    return _sum(Counter({t.dtype: 8 * (t.data_offsets[1] - t.data_offsets[0])}) for t in header.tensors.values())


def _sum(counts: Iterable[Counter[str]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total
