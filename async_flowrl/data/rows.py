"""Rows of prompt files: txt and jsonl files here, tables in tables.py.

A row becomes Python objects only when it is read. Large files stay on disk, so that memory does not grow with the
length of their rows: of each line, 16 bytes say where it is.
"""

import io
import json
import os
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from async_flowrl.config.messages import first_line, unknown_name
from async_flowrl.data import tables
from async_flowrl.data.messages import PromptError
from async_flowrl.data.tables import TableRows

IN_MEMORY_BYTES = 32 * 2**20
"""Largest txt or jsonl file whose bytes are kept in memory."""
BUFFER_BYTES = 2**20
"""Bytes that are read at a time where all rows of a file are read."""
MAX_LINE_BYTES = 64 * 2**20
"""Longest line that is read; a longer one would be in memory as a whole before anything could be said about it."""
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
    """The lines of a txt or jsonl file; blank lines are skipped. In a txt file, each line is the column `key`.

    A large file stays open, and everything is read from it, so that a file that replaces it changes nothing. Raises
    PromptError for a line of more than MAX_LINE_BYTES.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self._key, self._json = key, path.suffix == ".jsonl"
        self._file = path.open("rb", buffering=0)
        kept = os.fstat(self._file.fileno()).st_size <= IN_MEMORY_BYTES
        self._bytes = self._file.read() if kept else None
        if kept:
            self._file.close()
        self._starts, self._lengths, self._numbers = array("q"), array("I"), array("I")
        start = 0
        with self._opened() as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if len(line) > MAX_LINE_BYTES:
                    raise PromptError(f"{path}:{number}: the line has more than {MAX_LINE_BYTES / 2**20:g} MiB")
                if not _blank(line):
                    mark = len(BYTE_ORDER_MARK) if start == 0 and line.startswith(BYTE_ORDER_MARK) else 0
                    self._starts.append(start + mark)
                    self._lengths.append(len(line.removesuffix(b"\n")) - mark)
                    self._numbers.append(number)
                start += len(line)

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
        with self._opened() as file:
            for index in range(len(self)):
                file.seek(self._starts[index])
                try:
                    yield self._parsed(index, file.read(self._lengths[index]))
                except PromptError as refusal:
                    yield refusal

    def _opened(self) -> BinaryIO:
        """Returns the file, at its beginning, with a position of its own."""
        if self._bytes is not None:
            return io.BytesIO(self._bytes)
        return io.BufferedReader(_Again(self._file), BUFFER_BYTES)

    def _parsed(self, index: int, line: bytes) -> Row:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise PromptError(f"{self.where(index)}: not UTF-8 text: {error}") from error
        if not self._json:
            return {self._key: text.removesuffix("\r")}
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # no JSON, integers with too many digits, too deep nesting
            raise PromptError(f"{self.where(index)}: not JSON: {first_line(error)}") from error
        if not isinstance(row, dict):
            raise PromptError(f"{self.where(index)}: expected a JSON object, got {type(row).__name__}")
        return row


class _Again(io.RawIOBase):
    """An open file from its beginning, whatever its path names by now; many may read it at a time."""

    def __init__(self, file: io.FileIO) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = os.preadv(self._file.fileno(), [buffer], self._position)
        self._position += count
        return count


def open_rows(path: Path, key: str) -> Rows:
    """Returns the rows of a prompt file or a dataset folder; `key` is the column of the prompt.

    Raises PromptError, one sentence, if the file cannot be read or has an unknown suffix.
    """
    if path.is_dir():
        return TableRows(path, tables.dataset_files(path), key)
    if path.suffix not in READERS:
        raise PromptError(unknown_name(f"the ending of {path}", path.suffix, READERS))
    return READERS[path.suffix](path, key)


def _parquet(path: Path, key: str) -> Rows:
    return TableRows(path, [path], key)


READERS = {".txt": LineRows, ".jsonl": LineRows, ".parquet": _parquet}


def _blank(line: bytes) -> bool:
    return not line.strip() or (not line.isascii() and not line.decode(errors="replace").strip())
