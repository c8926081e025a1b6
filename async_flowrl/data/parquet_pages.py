"""The length of the longest text that a column of a parquet file may hold, read off the headers of its pages."""

from typing import Any, BinaryIO

EXPANDING = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY"})
"""Encodings of texts that write a text, or its beginning, once however often it occurs."""
NEXT_FIELD_IS_I32 = b"\x15"
"""First byte of a field of a page's header: the number of the field is one higher, and it is an integer."""
INDEX_BYTES = 4
"""Largest number of bytes of a value that refers to the dictionary."""
USUAL_PAGE_BYTES = 2**20
"""Size at which writers close a page of texts in full, so that only a page of a single text is larger."""
VARINT_BYTES = 5
"""Largest number of bytes of a 32-bit integer in a page's header."""


def longest_value(opened: BinaryIO, chunk: Any) -> int:
    """Returns how many bytes one text of a column chunk may have, as far as the file tells it; 0 for numbers.

    `opened` is the parquet file, `chunk` a pyarrow.parquet.ColumnChunkMetaData. No text is longer than the page that
    writes it once: the dictionary, or with DELTA_BYTE_ARRAY a page as large as the first. A writer whose dictionary is
    full goes on with pages of texts in full; they are longer than references to the dictionary would be, and their
    texts count as USUAL_PAGE_BYTES. If all texts are written in full, it is their average length.
    """
    if chunk.physical_type != "BYTE_ARRAY":
        return 0
    if EXPANDING.isdisjoint(chunk.encodings):
        return int(chunk.total_uncompressed_size // max(1, chunk.num_values))
    whole = int(chunk.total_uncompressed_size)
    size = _first_page_bytes(opened, chunk)
    if size is None:
        return whole
    in_full = chunk.has_dictionary_page and whole - size > 2 * INDEX_BYTES * chunk.num_values
    return min(whole, max(size, USUAL_PAGE_BYTES if in_full else 0))


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
