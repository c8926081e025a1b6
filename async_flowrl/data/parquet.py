"""Parquet files, decoded in bounded memory: small tables stay in memory, large ones are copied to a file.

Parquet writes a value that occurs often only once, so neither the size of a file nor any number in it says how large
its rows are once they are decoded. They are therefore decoded a few at a time, and what they take is measured. The
columns are compressed and give no access to single rows, so a table that is large once decoded is copied to a temporary
Arrow file, which is memory-mapped. That file has no name, so nothing is left of it, however the process ends.
"""

import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config.messages import first_line
from async_flowrl.data.messages import PromptError
from async_flowrl.data.parquet_pages import longest_value

DECODED_BYTES = 128 * 2**20
"""Largest number of bytes that are decoded at a time, if every text is as long as the longest that may be there."""
MAX_ROWS = 1024
"""Largest number of rows that are decoded at a time."""
CHUNK_BYTES = 4 * 2**20
"""Decoded rows are put together to chunks of about this size: a table of many small chunks is slow to look up."""
CHUNK_ROWS = 65_536
"""Largest number of rows of such a chunk."""
BUFFER_BYTES = 2**20
"""Bytes that are read at a time of a column of a row group, which can be large."""
NUMBER_BYTES = 8
"""Size of a decoded number, or of the offset of a decoded text."""


@dataclass(frozen=True)
class ParquetColumns:
    """Some columns of an open parquet file."""

    path: Path
    file: Any
    """A pyarrow.parquet.ParquetFile."""
    names: tuple[str, ...]

    @property
    def schema(self) -> Any:
        """Returns the columns' fields once they are decoded: categories are plain texts or numbers then."""
        import pyarrow

        fields = [self.file.schema_arrow.field(name) for name in self.names]
        coded = self.categories
        return pyarrow.schema([one.with_type(one.type.value_type) if one.name in coded else one for one in fields])

    @property
    def categories(self) -> tuple[str, ...]:
        """Returns the names of columns that were written as categories, with every category once per row group."""
        from pyarrow.types import is_dictionary

        return tuple(name for name in self.names if is_dictionary(self.file.schema_arrow.field(name).type))


def open_file(path: Path) -> Any:
    """Opens a parquet file, of which columns are read piece by piece. Raises pyarrow.ArrowException or OSError."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES)


def read_table(columns: ParquetColumns, keep_bytes: int) -> Any:
    """Returns the columns as a pyarrow table: in memory, or mapped from a temporary file.

    Decoded columns of more than `keep_bytes` are not kept in memory. Raises PromptError if a row cannot be decoded in
    DECODED_BYTES, or if the temporary file cannot be written; pyarrow.ArrowException or OSError if the parquet file
    cannot be read.
    """
    import pyarrow

    chunks, kept, size = _chunks(columns), [], 0
    for chunk in chunks:
        kept.append(chunk)
        size += chunk.nbytes
        if size > keep_bytes:
            return _copied(columns, _first(kept, chunks))
    return pyarrow.Table.from_batches(kept, columns.schema)


def rows_at_a_time(columns: ParquetColumns, group: int) -> int:
    """Returns how many rows of a row group are decoded at a time: in DECODED_BYTES if lists are about equally long.

    Raises PromptError if a column's dictionary alone, the page with each of its values once, is larger.
    """
    row_group, row_bytes = columns.file.metadata.row_group(group), 0
    with columns.path.open("rb") as opened:
        for chunk in map(row_group.column, range(row_group.num_columns)):
            if not any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in columns.names):
                continue
            longest = longest_value(opened, chunk)
            if chunk.has_dictionary_page and longest > DECODED_BYTES:
                raise PromptError(
                    f"{columns.path}: the different values of its column {chunk.path_in_schema} take {_mib(longest)} "
                    f"together, and at most {_mib(DECODED_BYTES)} are read at a time: leave the column out, or write "
                    "the file without dictionary encoding"
                )
            values = -(-chunk.num_values // max(1, row_group.num_rows))
            row_bytes += values * (longest + NUMBER_BYTES)
    return max(1, min(MAX_ROWS, DECODED_BYTES // max(1, row_bytes)))


def _chunks(columns: ParquetColumns) -> Iterator[Any]:
    """Yields the record batches of all rows, small ones put together."""
    waiting: list[Any] = []
    rows, size = 0, 0
    for batch in _batches(columns):
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= CHUNK_BYTES or rows >= CHUNK_ROWS:
            yield from _together(waiting)
            waiting, rows, size = [], 0, 0
    yield from _together(waiting)


def _together(batches: list[Any]) -> Iterator[Any]:
    import pyarrow

    if batches:
        yield from pyarrow.Table.from_batches(batches).combine_chunks().to_batches()


def _batches(columns: ParquetColumns) -> Iterator[Any]:
    """Yields the record batches of all rows, each within the bound. Raises PromptError for rows that exceed it."""
    first = 0
    for group in range(columns.file.num_row_groups):
        for batch in _decoded(columns, group, rows_at_a_time(columns, group)):
            last = first + batch.num_rows - 1
            if batch.nbytes > DECODED_BYTES:
                rows = f"row {first}" if first == last else f"rows {first} to {last}"
                raise PromptError(
                    f"{columns.path}, {rows}: decoded, that is {_mib(batch.nbytes)}, and at most "
                    f"{_mib(DECODED_BYTES)} are read at a time"
                )
            first = last + 1
            yield batch


def _decoded(columns: ParquetColumns, group: int, count: int) -> Iterator[Any]:
    """Yields the rows of a row group as record batches of at most `count` rows.

    Categories are read for the whole row group and decoded piece by piece: each batch would have a copy of all of them.
    Raises PromptError for an OSError, which the writer of a copy must not take for its own.
    """
    import pyarrow

    coded, schema = columns.categories, columns.schema
    plain = [name for name in columns.names if name not in coded]
    try:
        categories: Any = columns.file.read_row_group(group, list(coded)) if coded else None
        start = 0
        for arrays, length in _plain(columns, group, plain, count):
            for name in coded:
                pieces = categories[name].slice(start, length).chunks
                arrays[name] = pyarrow.concat_arrays([each.dictionary.take(each.indices) for each in pieces])
            start += length
            yield pyarrow.RecordBatch.from_arrays([arrays[name] for name in columns.names], schema=schema)
    except OSError as error:
        raise PromptError(f"{columns.path} is not a parquet file: {first_line(error)}") from error


def _plain(columns: ParquetColumns, group: int, names: list[str], count: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (column → values, number of rows) for the columns `names`, of which there may be none."""
    if names:
        for batch in columns.file.iter_batches(count, row_groups=[group], columns=names):
            yield {name: batch.column(name) for name in names}, batch.num_rows
        return
    rows = columns.file.metadata.row_group(group).num_rows
    for start in range(0, rows, count):
        yield {}, min(count, rows - start)


def _first(kept: list[Any], others: Iterator[Any]) -> Iterator[Any]:
    """Yields what is in the list, which it empties, and then the others."""
    kept.reverse()
    while kept:
        yield kept.pop()
    yield from others


def _copied(columns: ParquetColumns, batches: Iterator[Any]) -> Any:
    """Returns the batches as a table that is memory-mapped from a temporary Arrow file.

    Raises PromptError if that file cannot be written.
    """
    import pyarrow
    import pyarrow.ipc

    try:
        with tempfile.TemporaryFile() as copy:
            with pyarrow.ipc.new_stream(copy, columns.schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            copy.flush()
            pyarrow.default_memory_pool().release_unused()
            mapped = mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)
        return pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped)).read_all()
    except OSError as error:
        raise PromptError(
            f"{columns.path} is large, and a copy of it for random access cannot be written to "
            f"{tempfile.gettempdir()}: {first_line(error)}; the variable TMPDIR names another folder"
        ) from error


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
