"""Rows of tables: parquet files, and datasets that `save_to_disk` of the library `datasets` wrote (Arrow IPC streams).

Datasets are memory-mapped. Parquet files are read by parquet.py.
"""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_flowrl.config.messages import first_line, unknown_name
from async_flowrl.data.messages import PromptError
from async_flowrl.data.parquet import ParquetColumns, open_file, read_table

IN_MEMORY_BYTES = 32 * 2**20
"""Largest size of decoded parquet columns, of all files together, that is kept in memory."""
BATCH_ROWS = 1024
"""Largest number of table rows that are Python objects at the same time during a scan."""
BATCH_BYTES = 4 * 2**20
"""Largest size of rows, as they are in the table, that become Python objects at the same time, unless one is larger."""


class TableRows:
    """The rows of parquet files, or of the Arrow files of a dataset folder; `key` is the prompt's column.

    Raises PromptError if the files have different columns, or lack `key` or have it as bytes.
    """

    def __init__(self, path: Path, files: Sequence[Path], key: str) -> None:
        import pyarrow

        self.path, self._files = path, files
        tables: list[tuple[Any, list[str]]] = []
        for file in files:
            tables.append(_table(file, IN_MEMORY_BYTES - sum(table.nbytes for table, _ in tables)))
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
            rows = max(1, BATCH_BYTES * batch.num_rows // max(1, batch.nbytes))
            for start in range(0, batch.num_rows, rows):
                yield from batch.slice(start, rows).to_pylist()


def dataset_files(folder: Path) -> list[Path]:
    """Returns the files of a dataset folder, in the order of its state.json. Raises PromptError if it has none."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{folder} is not a dataset that save_to_disk wrote: {first_line(error)}") from error


def _table(path: Path, keep_bytes: int) -> tuple[Any, list[str]]:
    """Returns a file's columns, and the names of those that hold bytes and are left out.

    Columns of a parquet file are kept in memory if they take at most `keep_bytes` decoded.
    """
    import pyarrow

    parquet = path.suffix == ".parquet"
    try:
        if not parquet:
            table = _mapped(path)
            left_out = _bytes_columns(table.schema)
            return table.drop_columns(left_out), left_out
        file = open_file(path)
        if twice := [name for name, count in Counter(file.schema_arrow.names).items() if count > 1]:
            raise PromptError(f"{path}: several of its columns are called {twice[0]!r}; each needs a name of its own")
        left_out = _bytes_columns(file.schema_arrow)
        kept = tuple(name for name in file.schema_arrow.names if name not in left_out)
        return read_table(ParquetColumns(path, file, kept), keep_bytes), left_out
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(
            f"{path} is not {'a parquet' if parquet else 'an Arrow'} file: {first_line(error)}"
        ) from error


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
