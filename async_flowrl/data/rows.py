"""Rows of prompt files: lines of txt and jsonl, tables of parquet files and of datasets that `save_to_disk` wrote.

A row becomes Python objects only when it is read. Large files stay on disk: of each line, 16 bytes say where it is;
tables are memory-mapped Arrow files. Parquet gives no access to single rows, so it is copied to a temporary Arrow file.
"""

import json
import mmap
import os
import shlex
import tempfile
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from async_flowrl.config.error_text import first_line, unknown_name
from async_flowrl.data import condition_images
from async_flowrl.data.prompts import PromptError
from async_flowrl.types import EVALUATION, TRAIN

# Largest txt or jsonl file whose bytes are kept in memory.
IN_MEMORY_BYTES = 32 * 2**20
# A longer line would be in memory as a whole before anything could be said about it.
MAX_LINE_BYTES = 64 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Rows of a table that are decoded, or are Python objects, at the same time; with images in them, so many.
BATCH_ROWS = 1024
BATCH_IMAGE_ROWS = 16
BUFFER_BYTES = 2**20
# Split → its names in files and datasets; the first that exists is used.
NAMES = {TRAIN: ("train",), EVALUATION: ("test", "validation", "val", "evaluation")}
PATTERNS = ("{}.txt", "{}.jsonl", "{}_metadata.jsonl", "{}.parquet", "{}-*-of-*.parquet", "data/{}-*-of-*.parquet")

Row = Mapping[str, Any]


class LineRows:
    """The lines of a txt or jsonl file that are not blank; in a txt file, each line is the column `key`.

    A large file stays open, so that a file that replaces it changes nothing. Raises PromptError.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.folder = path, path.parent
        self._key, self._json = key, path.suffix == ".jsonl"
        self._bytes: bytes | None = None
        self._starts, self._lengths, self._numbers = array("q"), array("I"), array("I")
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise PromptError(f"{path}:{number}: the line has more than {MAX_LINE_BYTES / 2**20:g} MiB")
                if line.strip() and (line.isascii() or line.decode(errors="replace").strip()):  # it is not blank
                    mark = len(BYTE_ORDER_MARK) if start == 0 and line.startswith(BYTE_ORDER_MARK) else 0
                    self._starts.append(start + mark)
                    self._lengths.append(len(line.removesuffix(b"\n")) - mark)
                    self._numbers.append(number)
                start += len(line)
            if start <= IN_MEMORY_BYTES:
                self._bytes = os.pread(file.fileno(), start, 0)
            else:
                self._file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)

    def __len__(self) -> int:
        return len(self._starts)

    def where(self, index: int) -> str:
        return f"{self.path}:{self._numbers[index]}"

    def row(self, index: int) -> Row:
        start, length = self._starts[index], self._lengths[index]
        if self._bytes is not None:
            return self._parsed(index, self._bytes[start : start + length])
        try:
            return self._parsed(index, os.pread(self._file.fileno(), length, start))
        except OSError as error:  # network file systems lose files that are replaced
            raise PromptError(f"{self.where(index)}: the file cannot be read any more: {error}") from error

    def scan(self) -> Iterator[Row | PromptError]:
        for index in range(len(self)):
            try:
                yield self.row(index)
            except PromptError as refusal:
                yield refusal

    def _parsed(self, index: int, line: bytes) -> Row:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise PromptError(f"{self.where(index)}: not UTF-8 text: {error}") from error
        if not self._json:
            text = text.removesuffix("\r")
            if "\r" in text:
                raise PromptError(f"{self.where(index)}: lines end with LF or CR LF, and this one holds a CR alone")
            return {self._key: text}
        try:
            row = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:  # no JSON, integers with too many digits, too deep nesting
            raise PromptError(f"{self.where(index)}: not JSON ({first_line(error)}): it must be {ONE_EACH}") from error
        if not isinstance(row, dict):
            raise PromptError(f"{self.where(index)}: it must be {ONE_EACH}, got {type(row).__name__}")
        return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands twice in an object")
    return row


class TableRows:
    """The rows of parquet files, or of the Arrow files of a dataset folder; `key` is the prompt's column.

    Of columns of bytes only those of `images` are read. Raises PromptError if the files have different columns, or lack
    `key` or have it as bytes.
    """

    def __init__(self, path: Path, files: Sequence[Path], key: str, images: Sequence[str] = ()) -> None:
        import pyarrow

        self.path, self._files = path, files
        self.folder = path if path.is_dir() else path.parent
        tables, left_out = zip(*[_table(file, images) for file in files], strict=True)
        self._starts = list(accumulate((table.num_rows for table in tables[:-1]), initial=0))
        try:
            table = pyarrow.concat_tables(tables, promote_options="default")
        except pyarrow.ArrowInvalid as error:
            raise PromptError(f"{path}: its files have different columns: {first_line(error)}") from error
        self.left_out = tuple(dict.fromkeys(chain.from_iterable(left_out)))
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

    def row(self, index: int) -> Row:
        (row,) = self._table.slice(index, 1).to_pylist()
        return dict(row)

    def scan(self) -> Iterator[Row | PromptError]:
        rows = BATCH_IMAGE_ROWS if any(_holds_bytes(field.type) for field in self._table.schema) else BATCH_ROWS
        for batch in self._table.to_batches(max_chunksize=rows):
            yield from batch.to_pylist()


ONE_EACH = "one JSON object on each line"
# The rows of one file in its order. `where` names the place of a row, `row` returns its columns (or raises
# PromptError), `scan` yields all rows, faster, with a PromptError in place of a row that cannot be read, and `left_out`
# names the columns that hold bytes and are not read. `folder` is that from which paths of images are looked up.
Rows = LineRows | TableRows


def open_rows(path: Path, key: str, images: Sequence[str] = ()) -> Rows:
    """Returns the rows of a prompt file or dataset folder; `key` is the column of the prompt. Raises PromptError.

    `images` names the columns whose bytes are read.
    """
    if path.is_dir():
        return TableRows(path, _files(path), key, images)
    if path.suffix in (".txt", ".jsonl"):
        return LineRows(path, key)
    if path.suffix == ".parquet":
        return TableRows(path, [path], key, images)
    name, to = shlex.quote(str(path)), shlex.quote(f"{path}l")
    array = f"; `jq -c '.[]' {name} > {to}` writes an array like that" if path.suffix == ".json" else ""
    lines = f".txt (a prompt on each line), .jsonl ({ONE_EACH}) and .parquet"
    raise PromptError(f"{path} ends in {path.suffix!r}, and what is read is {lines}{array}")


def split_files(path: Path, split: str) -> list[Path] | None:
    """Returns the files of `split` (parts of one table) or the folder of its dataset; None if there is none.

    A file, or a folder that `save_to_disk` wrote for one split, is returned as it is. Raises PromptError if several
    match.
    """
    if not path.is_dir() or (path / "state.json").is_file():
        return [path]
    described = path / "dataset_dict.json"
    datasets = (
        _listed(described, lambda content: [str(name) for name in content["splits"]]) if described.is_file() else []
    )
    for name in NAMES[split]:
        if name in datasets:
            return [path / name]
        by_pattern = {pattern: files for pattern in PATTERNS if (files := sorted(path.glob(pattern.format(name))))}
        if len(by_pattern) > 1:
            several = ", ".join(file.name for files in by_pattern.values() for file in files)
            raise PromptError(f"{path} has several files of the split {name!r} ({several}): give the one you mean")
        if by_pattern:
            return next(iter(by_pattern.values()))
    return None


def _files(dataset: Path) -> list[Path]:
    names = _listed(dataset / "state.json", lambda state: [entry["filename"] for entry in state["_data_files"]])
    return [dataset / name for name in names]


def _listed(file: Path, read: Callable[[Any], list[str]]) -> list[str]:
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PromptError(f"{file} is not of a dataset that save_to_disk wrote: {first_line(error)}") from error


def _table(path: Path, images: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the memory-mapped table of a file, and the names of its columns that hold bytes and are left out."""
    import pyarrow
    import pyarrow.ipc

    if path.suffix == ".parquet":
        return _copied(path, images)
    try:
        table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"{path} is not an Arrow file: {first_line(error)}") from error
    left_out = [field.name for field in table.schema if _holds_bytes(field.type) and field.name not in images]
    return table.drop_columns(left_out), left_out


def _copied(path: Path, images: Sequence[str]) -> tuple[Any, list[str]]:
    """Like `_table`, for a parquet file: a copy of it in an Arrow file without a name, which ends with this process.

    In it are the paths of images, whose bytes are files of the cache then.
    """
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
    from pyarrow.types import is_dictionary

    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"{path} is not a parquet file: {first_line(error)}") from error
    if twice := [name for name, count in Counter(file.schema_arrow.names).items() if count > 1]:
        raise PromptError(f"{path}: several of its columns are called {twice[0]!r}; each needs a name of its own")
    images = [field.name for field in file.schema_arrow if field.name in images and _holds_bytes(field.type)]
    paths = pyarrow.list_(pyarrow.string())
    kept = [
        field.with_type(paths) if field.name in images else field
        for field in file.schema_arrow
        if field.name in images or not _holds_bytes(field.type)
    ]
    # A column of categories would come with all of them in every batch.
    schema = pyarrow.schema([f.with_type(f.type.value_type) if is_dictionary(f.type) else f for f in kept])
    try:
        with tempfile.TemporaryFile() as copy:
            with pyarrow.ipc.new_stream(copy, schema) as writer:
                for batch in _batches(path, file, schema.names, BATCH_IMAGE_ROWS if images else BATCH_ROWS):
                    columns = [c.dictionary_decode() if is_dictionary(c.type) else c for c in batch]
                    for place, name in enumerate(schema.names):
                        if name in images:
                            columns[place] = pyarrow.array(_paths(path, name, columns[place].to_pylist()), paths)
                    writer.write_batch(pyarrow.RecordBatch.from_arrays(columns, schema=schema))
            copy.flush()
            mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise PromptError(
            f"{path}: a copy of it for random access cannot be written to {tempfile.gettempdir()}: "
            f"{first_line(error)}; the variable TMPDIR names another folder"
        ) from error
    pyarrow.default_memory_pool().release_unused()
    left_out = [name for name in file.schema_arrow.names if name not in schema.names]
    return pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped)).read_all(), left_out


def _paths(path: Path, name: str, cells: Sequence[Any]) -> list[list[str] | None]:
    try:
        return [condition_images.stored(cell) if cell else None for cell in cells]
    except ValueError as error:
        raise PromptError(f"{path}, column {name}: {error}") from error


def _batches(path: Path, file: Any, columns: Sequence[str], rows: int) -> Iterator[Any]:
    import pyarrow

    try:
        yield from file.iter_batches(rows, columns=columns) if columns else ()
    except (pyarrow.ArrowException, OSError) as error:
        raise PromptError(f"{path} is not a parquet file: {first_line(error)}") from error


def _holds_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))
