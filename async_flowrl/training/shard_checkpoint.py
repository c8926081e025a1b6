"""Tensors of checkpoints that lie in shares on several ranks, in the format of torch.distributed.checkpoint.

Each rank writes a file of its own into the folder `shards` of the checkpoint, and the first one the metadata. Anybody
can read whole tensors of it, one at a time (`ShardedTensors`); ranks read their shares only.
"""

import errno
import pickle
import socket
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

_METADATA = "torch.distributed.checkpoint.metadata"


# Module and name of everything that a checkpoint's metadata needs besides classes of _METADATA, paths and dtypes.
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class SafeReader(FileSystemReader):
    """A FileSystemReader that raises ValueError for metadata that names anything but what torch writes there.

    The metadata is read once per reader, since torch asks for it with every load.
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
        is_metadata = module == _METADATA and getattr(getattr(metadata, name, None), "__module__", None) == _METADATA
        path = module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if path:
            return PurePath
        if is_metadata or dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"the metadata of a checkpoint names {module}.{name}, which torch does not put there")


REPLICATED = "algorithm"  # Part of a checkpoint of which every rank has all: the state of an algorithm.


# Part → name → CPU tensor, as in `Checkpoint.tensors`; a name ends with `/` and the name of a trained tensor, or is
# one.
Parts = Mapping[str, Mapping[str, Tensor]]


Shapes = Mapping[str, tuple[int, ...]]  # Trained tensor → its whole shape.


def write_shards(folder: Path, parts: Parts, shapes: Shapes, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    """Writes and syncs this rank's shares; all ranks of `group` call it. Raises OSError on all if one cannot write."""
    state = {
        f"{part}/{name}": tensor if part == REPLICATED else _sharded(tensor, shapes[name.rpartition("/")[2]], mesh)
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }
    writer = _Writer(str(folder), single_file_per_rank=True, sync_files=True)
    try:
        save(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, OSError):
            raise OSError(f"a trainer rank cannot write its share of a checkpoint: {first}") from error
        raise


class _Writer(FileSystemWriter):
    """A FileSystemWriter that raises the OSError of a write, and makes no folder where the others' is not seen."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not (folder := Path(self.path).parent).is_dir():
            where = (
                f"{socket.gethostname()} does not see this folder; output_dir must be one that all trainer ranks share"
            )
            raise FileNotFoundError(errno.ENOENT, where, str(folder))
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise cause from error


def read_shards(folder: Path, mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """Returns this rank's shares by part and name. No rank waits for another."""
    reader = SafeReader(str(folder))
    state: dict[str, Tensor] = {}
    for key, (shape, dtype) in _stored(reader).items():
        if key.startswith(f"{REPLICATED}/"):
            state[key] = torch.empty(shape, dtype=dtype)
        else:
            rows = torch.chunk(torch.empty(shape, dtype=dtype, device="meta"), mesh.size())
            local_rows = rows[mesh.get_local_rank()] if mesh.get_local_rank() < len(rows) else rows[0][:0]
            state[key] = _sharded(torch.empty_like(local_rows, device="cpu"), shape, mesh)
    _load(state, reader)
    parts: dict[str, dict[str, Tensor]] = {"optimizer": {}}  # of a checkpoint before the first optimizer step
    for key, tensor in state.items():
        part, name = key.split("/", 1)
        parts.setdefault(part, {})[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return parts


class ShardedTensors(Mapping[str, Tensor]):
    """The whole tensors of one part by name; each access reads the tensor from the files of all ranks."""

    def __init__(self, folder: Path, part: str) -> None:
        self._reader, self._part = SafeReader(str(folder)), part
        self._stored = {
            key.removeprefix(f"{part}/"): value
            for key, value in _stored(self._reader).items()
            if key.startswith(f"{part}/")
        }

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._stored[name]
        whole = torch.empty(shape, dtype=dtype)
        _load({f"{self._part}/{name}": whole}, self._reader)
        return whole

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._stored))

    def __len__(self) -> int:
        return len(self._stored)


def whole_parts(folder: Path) -> dict[str, Mapping[str, Tensor]]:
    """Returns all parts of a checkpoint, whose tensors are read when they are asked for."""
    parts = sorted({key.split("/", 1)[0] for key in _stored(SafeReader(str(folder)))})
    return {part: ShardedTensors(folder, part) for part in parts}


def _load(state: dict[str, Tensor], reader: SafeReader) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
        load(state, storage_reader=reader, no_dist=True)


def _stored(reader: SafeReader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {key: cast("TensorStorageMetadata", described) for key, described in metadata.items()}
    return {key: (described.size, described.properties.dtype) for key, described in tensors.items()}


def _sharded(local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)
