"""The length of the longest text that a column of a parquet file may hold, read off the headers of its pages."""

from typing import Any, BinaryIO

EXPANDING = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings of texts that write a text, or its beginning, once however often it occurs."""
NEXT_FIELD_IS_I32 = b"\x15"
"""First byte of a field of a page's header: the number of the field is one higher, and it is an integer."""
VARINT_BYTES = 5
"""Largest number of bytes of a 32-bit integer in a page's header."""


def longest_value(opened: BinaryIO, chunk: Any) -> int:
    """Returns an upper bound of the bytes of one text in a column chunk; 0 for numbers.

    `opened` is the parquet file, `chunk` a pyarrow.parquet.ColumnChunkMetaData. No text is longer than the page that
    writes it once: the dictionary, or with DELTA_BYTE_ARRAY a page as large as the first. Texts that are written in
    full take as much of the file, so for those the average is returned.
    """
    if chunk.physical_type != "BYTE_ARRAY":
        return 0
    if EXPANDING.isdisjoint(chunk.encodings):
        return int(chunk.total_uncompressed_size // max(1, chunk.num_values))
    size = _first_page_bytes(opened, chunk)
    return int(chunk.total_uncompressed_size if size is None else min(size, chunk.total_uncompressed_size))


def _first_page_bytes(opened: BinaryIO, chunk: Any) -> int | None:
    """Returns the uncompressed size of a column chunk's first page, its dictionary if it has one; None if unknown.

    The header of a page is a structure of thrift's compact protocol that begins with two integers: kind and size.
    """
    opened.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))))
    header = opened.read(2 * (1 + VARINT_BYTES))
    kind = _varint(header, 1) if header[:1] == NEXT_FIELD_IS_I32 else None
    if kind is None or header[kind[1] : kind[1] + 1] != NEXT_FIELD_IS_I32:
        return None
    size = _varint(header, kind[1] + 1)
    return None if size is None or size[0] < 0 else size[0]


def _varint(data: bytes, start: int) -> tuple[int, int] | None:
    """Returns an integer, zigzag-coded in seven bits per byte, and where it ends; None if it does not end."""
    number = 0
    for index, byte in enumerate(data[start : start + VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), start + index + 1
    return None
