"""Rows of tables: parquet files, and datasets that `save_to_disk` of the library `datasets` wrote (Arrow IPC streams).

Datasets are memory-mapped. A large parquet file, whose compressed columns give no access to single rows, is copied to a
temporary Arrow file, which is memory-mapped, too. That file has no name, so nothing is left of it, however the process
ends.
"""

import json
import mmap
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_flowrl.config.messages import first_line, unknown_name
from async_flowrl.data.messages import PromptError

BATCH_ROWS = 1024
"""Largest number of table rows that are Python objects at the same time during a scan."""
IN_MEMORY_BYTES = 32 * 2**20
"""Largest parquet file, by its uncompressed size, whose columns are kept in memory."""


class TableRows:
    """The rows of parquet files, or of the Arrow files of a dataset folder; `key` is the prompt's column.

    Raises PromptError if the files have different columns, or lack `key` or have it as bytes.
    """

    def __init__(self, path: Path, files: Sequence[Path], key: str) -> None:
        import pyarrow

        self.path, self._files = path, files
        tables = [_table(file) for file in files]
        ends = np.cumsum([table.num_rows for table, _ in tables])
        self._starts = [0, *(int(end) for end in ends[:-1])]
        try:
            table = pyarrow.concat_tables([table for table, _ in tables], promote_options="default")
        except pyarrow.ArrowInvalid as error:
            raise PromptError(f"{path}: its files have different columns: {first_line(error)}") from error
        self.left_out = tuple(dict.fromkeys(name for _, names in tables for name in names))
        self._table = table.drop_columns([name for name in self.left_out if name in table.column_names])
        if key in self.left_out:
            raise PromptError(f"{path}: data.prompt_key={key} is a column of bytes; prompts must be written as text")
        if key not in self._table.column_names:
            raise PromptError(f"{path}: {unknown_name('data.prompt_key', key, self._table.column_names)}")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, index: int) -> str:
        file = bisect_right(self._starts, index) - 1
        return f"{self._files[file]}, row {index - self._starts[file]}"

    def row(self, index: int) -> Mapping[str, Any]:
        (row,) = self._table.slice(index, 1).to_pylist()
        return dict(row)

    def scan(self) -> Iterator[Mapping[str, Any] | PromptError]:
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield from batch.to_pylist()


def dataset_files(folder: Path) -> list[Path]:
    """Returns the files of a dataset folder, in the order of its state.json. Raises PromptError if it has none."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{folder} is not a dataset that save_to_disk wrote: {first_line(error)}") from error


def _table(path: Path) -> tuple[Any, list[str]]:
    """Returns a file's columns, and the names of those that hold bytes and are left out."""
    import pyarrow
    import pyarrow.parquet

    parquet = path.suffix == ".parquet"
    try:
        if not parquet:
            table = _mapped(path)
            left_out = _bytes_columns(table.schema)
            return table.drop_columns(left_out), left_out
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
        left_out = _bytes_columns(file.schema_arrow)
        kept = [name for name in file.schema_arrow.names if name not in left_out] if left_out else None
        size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
        return (file.read(kept) if size <= IN_MEMORY_BYTES else _copied(path, file, kept)), left_out
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(
            f"{path} is not {'a parquet' if parquet else 'an Arrow'} file: {first_line(error)}"
        ) from error


def _copied(path: Path, file: Any, columns: list[str] | None) -> Any:
    """Returns `columns` (None: all) of an open parquet file, memory-mapped from a temporary Arrow file.

    Raises PromptError if that file cannot be written.
    """
    import pyarrow
    import pyarrow.ipc

    schema = file.schema_arrow if columns is None else _chosen(file.schema_arrow, columns)
    try:
        with tempfile.TemporaryFile() as copy:
            with pyarrow.ipc.new_stream(copy, schema) as writer:
                for batch in _batches(path, file, columns):
                    writer.write_batch(batch)
            copy.flush()
            pyarrow.default_memory_pool().release_unused()
            mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
        return pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped)).read_all()
    except OSError as error:
        raise PromptError(
            f"{path} is large, and a copy of it for random access cannot be written to {tempfile.gettempdir()}: "
            f"{first_line(error)}; the variable TMPDIR names another folder"
        ) from error


def _batches(path: Path, file: Any, columns: list[str] | None) -> Iterator[Any]:
    """Yields the batches of an open parquet file. Raises PromptError, which its writer does not take for its own."""
    try:
        yield from file.iter_batches(columns=columns)
    except OSError as error:
        raise PromptError(f"{path} is not a parquet file: {first_line(error)}") from error


def _chosen(schema: Any, columns: Sequence[str]) -> Any:
    import pyarrow

    return pyarrow.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def _mapped(path: Path) -> Any:
    """Opens an Arrow IPC stream, whose columns stay in the memory-mapped file."""
    import pyarrow
    import pyarrow.ipc

    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


def _bytes_columns(schema: Any) -> list[str]:
    return [field.name for field in schema if _holds_bytes(field.type)]


def _holds_bytes(kind: Any) -> bool:
    """Returns True if a column's type is or contains binary data."""
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))
