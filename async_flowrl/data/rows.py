"""Rows of prompt files, stored compactly: lines as offsets into the file's bytes, tables as Arrow columns.

A row becomes Python objects only when it is read. Files are txt, jsonl or parquet. Folders are datasets written by
`save_to_disk` of the library `datasets` (Arrow IPC streams); they are memory-mapped.
"""

import io
import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from async_flowrl.config.messages import first_line, unknown_name
from async_flowrl.data.messages import PromptError

BATCH_ROWS = 1024
"""Largest number of table rows that are Python objects at the same time during a scan."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Row = Mapping[str, Any]


class Rows(Protocol):
    """The rows of one prompt file, in file order."""

    path: Path
    left_out: tuple[str, ...]
    """Columns that are not read because they hold bytes, such as images."""

    def __len__(self) -> int: ...

    def where(self, index: int) -> str:
        """Returns the place of a row for messages: "file:line" or "file, row n"."""
        ...

    def row(self, index: int) -> Row:
        """Returns the columns of one row. Raises PromptError, which names the row, if it cannot be read."""
        ...

    def scan(self) -> Iterator[Row | PromptError]:
        """Yields all rows in order, faster than `row`; a row that cannot be read is replaced by its PromptError."""
        ...


class LineRows:
    """The lines of a txt or jsonl file; blank lines are skipped. In a txt file, each line is the column `key`."""

    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key, self._json = key, path.suffix == ".jsonl"
        self._bytes = path.read_bytes()
        starts, numbers, start = array("q"), array("q"), 0
        for number, line in enumerate(io.BytesIO(self._bytes), start=1):
            if not _blank(line):
                starts.append(start)
                numbers.append(number)
            start += len(line)
        if starts and starts[0] == 0 and self._bytes.startswith(BYTE_ORDER_MARK):
            starts[0] = len(BYTE_ORDER_MARK)
        self._starts, self._numbers = starts, numbers

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def row(self, index: int) -> Row:
        start = self._starts[index]
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start : len(self._bytes) if end < 0 else end]
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise PromptError(f"{self.where(index)}: not UTF-8 text: {error}") from error
        return self._parsed(index, text) if self._json else {self._key: text.removesuffix("\r")}

    def scan(self) -> Iterator[Row | PromptError]:
        for index in range(len(self)):
            try:
                yield self.row(index)
            except PromptError as refusal:
                yield refusal

    def _parsed(self, index: int, text: str) -> Row:
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, integers with too many digits, too deep nesting
            raise PromptError(f"{self.where(index)}: not JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise PromptError(f"{self.where(index)}: expected a JSON object, got {type(row).__name__}")
        return row


class TableRows:
    """The rows of parquet files, or of the Arrow files of a dataset folder; `key` is the prompt's column.

    Raises PromptError if the files have different columns or lack `key`.
    """

    def __init__(self, path: Path, files: Sequence[Path], key: str) -> None:
        import pyarrow

        self.path, self._files = path, files
        tables = [_table(file) for file in files]
        ends = np.cumsum([table.num_rows for table in tables])
        self._starts = [0, *(int(end) for end in ends[:-1])]
        try:
            table = pyarrow.concat_tables(tables, promote_options="default")
        except pyarrow.ArrowInvalid as error:
            raise PromptError(f"{path}: its files have different columns: {first_line(error)}") from error
        if key not in table.column_names:
            raise PromptError(f"{path}: {unknown_name('data.prompt_key', key, table.column_names)}")
        self.left_out = tuple(field.name for field in table.schema if _holds_bytes(field.type))
        self._table = table.drop_columns(list(self.left_out))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, index: int) -> str:
        file = bisect_right(self._starts, index) - 1
        return f"{self._files[file]}, row {index - self._starts[file]}"

    def row(self, index: int) -> Row:
        (row,) = self._table.slice(index, 1).to_pylist()
        return dict(row)

    def scan(self) -> Iterator[Row | PromptError]:
        for batch in self._table.to_batches(max_chunksize=BATCH_ROWS):
            yield from batch.to_pylist()


def open_rows(path: Path, key: str) -> Rows:
    """Returns the rows of a prompt file or a dataset folder; `key` is the column of the prompt.

    Raises PromptError, one sentence, if the file cannot be read or has an unknown suffix.
    """
    if path.is_dir():
        return TableRows(path, _arrow_files(path), key)
    if path.suffix not in READERS:
        raise PromptError(unknown_name(f"the ending of {path}", path.suffix, READERS))
    return READERS[path.suffix](path, key)


def _parquet(path: Path, key: str) -> Rows:
    return TableRows(path, [path], key)


READERS = {".txt": LineRows, ".jsonl": LineRows, ".parquet": _parquet}


def _blank(line: bytes) -> bool:
    return not line.strip() or (not line.isascii() and not line.decode(errors="replace").strip())


def _arrow_files(folder: Path) -> list[Path]:
    """Returns the files of a dataset folder, in the order of its state.json."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{folder} is not a dataset that save_to_disk wrote: {first_line(error)}") from error


def _table(path: Path) -> Any:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    parquet = path.suffix == ".parquet"
    read = partial(pyarrow.parquet.read_table, path, partitioning=None) if parquet else partial(_mapped, path)
    try:
        return read()
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(
            f"{path} is not {'a parquet' if parquet else 'an Arrow'} file: {first_line(error)}"
        ) from error


def _mapped(path: Path) -> Any:
    """Opens an Arrow IPC stream, whose columns stay in the memory-mapped file."""
    import pyarrow
    import pyarrow.ipc

    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


def _holds_bytes(kind: Any) -> bool:
    """Returns True if a column's type is or contains binary data."""
    import pyarrow.types as types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))
