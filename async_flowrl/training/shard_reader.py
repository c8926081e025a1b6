"""Reads the metadata of torch.distributed.checkpoint, a pickle, without running what somebody may have put into it."""

import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
"""Module and name of everything that a checkpoint's metadata needs besides classes of _METADATA, paths and dtypes."""


class SafeReader(FileSystemReader):
    """A FileSystemReader that raises ValueError for metadata that names anything but what torch writes there.

    The tensors themselves are read by torch.load(weights_only=True) in any case. The metadata is read once per reader:
    torch asks for it with every load, and it describes all tensors, so that to load them one by one would take a time
    that grows with the square of their number.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._metadata: dict[Path, Metadata] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self._get_metadata_path(kwargs.get("rank")))
        if file not in self._metadata:
            self._metadata[file] = self._read(file)
        described = self._metadata[file]
        described.storage_meta = described.storage_meta or StorageMeta()
        described.storage_meta.load_id = self.load_id
        return described

    def _read(self, file: Path) -> Metadata:
        with self.fs.create_stream(file, "rb") as stream:
            described = _Unpickler(stream).load()
        if not isinstance(described, Metadata):
            raise ValueError(f"{self.path}: the metadata is a {type(described).__name__}")
        return described


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        own = module == _METADATA and getattr(getattr(metadata, name, None), "__module__", None) == _METADATA
        path = module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path:
            return PurePath
        if own or dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"the metadata of a checkpoint names {module}.{name}, which torch does not put there")
