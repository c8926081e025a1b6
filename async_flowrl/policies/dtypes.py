"""The meaning of `model.dtype=auto`: the dtype in which most bytes of the transformer's files are stored.

Only the headers of the safetensors files are read, for a hub model also over the network.
"""

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
"""Name of a dtype in safetensors headers → `model.dtype`, for the two dtypes that are supported."""
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "F4": 4}
"""Bits per element, by the name of the dtype in safetensors headers; 8 for all others."""


def dtype_of_files(path: str, revision: str | None) -> str:
    """Returns `float32` or `bfloat16`, the dtype of the transformer's files of a local folder or of a hub model.

    `revision` is None for a local folder. Raises ValueError, one sentence, if most bytes have another dtype, and if no
    header can be read.
    """
    try:
        sizes = _local(Path(path) / FOLDER) if revision is None else _hub(path, revision)
    except (OSError, SafetensorError) as error:
        raise ValueError(_unreadable(path, first_line(error))) from error
    if not sizes:
        raise ValueError(_unreadable(path, f"there is no {FOLDER}/{FILE}"))
    stored, size = sizes.most_common(1)[0]
    if stored not in _STORED:
        share = size / sizes.total()
        raise ValueError(
            f"the transformer's files of model.path {path} hold {stored} ({share:.0%} of their bytes), which nothing "
            "is computed in here: set model.dtype to bfloat16 or float32, into which they are then cast"
        )
    return _STORED[stored]


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
    """Returns the number of bits in a file by dtype."""
    bits: Counter[str] = Counter()
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            tensor = opened.get_slice(name)
            bits[tensor.get_dtype()] += math.prod(tensor.get_shape()) * _BITS.get(tensor.get_dtype(), 8)
    return bits


def _hub(path: str, revision: str) -> Counter[str]:
    """Counts bits by dtype over all files of a hub transformer; only headers of files outside the cache are loaded."""
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
    """Counts bits by dtype from a file's header on the hub. Raises OSError if it cannot be loaded."""
    from huggingface_hub import parse_safetensors_file_metadata
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, SafetensorsParsingError

    if not hub_answers():
        raise OSError(f"{name} is not in the local cache, and the hub cannot be reached")
    # Its base classes include the HTTP library's error, which comes unwrapped if the hub does not answer.
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
