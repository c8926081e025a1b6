"""Tests of Parquet files that decode to far more memory than their size, and of those that are refused for it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.config.sections.data import DataConfig
from async_flowrl.data import parquet, tables
from async_flowrl.data.load import load_data
from async_flowrl.data.messages import PromptError
from async_flowrl.data.parquet import ParquetColumns, open_file, rows_at_a_time
from async_flowrl.data.parquet_pages import longest_value
from async_flowrl.data.tables import TableRows
from tests.integration.runs import ROOT

ROWS = 16_000
LONG = "s" * 8192
DECODED = ROWS * len(LONG)
"""Bytes of one of the files below once it is decoded: 131 MB, of files of less than 200 kB."""
BOUND = 64e6
"""Allowed peak: 34 MB of decoded rows that are kept before they go to disk, and the pieces that are on their way."""
PEAK = """
import sys
from collections.abc import Callable
from pathlib import Path
import pyarrow
from async_flowrl.config.sections.data import DataConfig
from async_flowrl.data.load import load_data
data = load_data(DataConfig(train=sys.argv[1], held_out=0.01), needs_target=False)
assert len(data.train) + len(data.evaluation) == int(sys.argv[2])
assert len(data.train[len(data.train) - 1].system) == int(sys.argv[3])
print(pyarrow.default_memory_pool().max_memory())
"""


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def columns(path: Path) -> ParquetColumns:
    file = open_file(path)
    return ParquetColumns(path, file, tuple(file.schema_arrow.names))


def texts(count: int = ROWS) -> list[str]:
    return [f"a cat {number}" for number in range(count)]


def messages() -> dict[str, Any]:
    """verl's layout: the same long system prompt in every row's messages."""
    system = {"role": "system", "content": LONG}
    return {"prompt": [[system, {"role": "user", "content": text}] for text in texts()]}


def column() -> dict[str, Any]:
    return {"prompt": texts(), "system_prompt": [LONG] * ROWS}


def categories() -> dict[str, Any]:
    return {"prompt": texts(), "system_prompt": pyarrow.array([LONG] * ROWS).dictionary_encode()}


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (column, {}),
        (messages, {}),
        (
            column,
            {"use_dictionary": False, "column_encoding": {"prompt": "PLAIN", "system_prompt": "DELTA_BYTE_ARRAY"}},
        ),
        (categories, {}),
    ],
    ids=["column", "messages", "prefixes", "categories"],
)
def test_long_repeated_texts_are_decoded_in_bounded_memory(
    tmp_path: Path, given: Callable[[], dict[str, Any]], options: dict[str, Any]
) -> None:
    path = write(tmp_path / "repeated.parquet", given(), **options)
    file = open_file(path)
    size = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
    assert max(size, path.stat().st_size) < BOUND / 50 and DECODED > 2 * BOUND
    words = [sys.executable, "-c", PEAK, str(path), str(ROWS), str(len(LONG))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) < BOUND
    assert not list(tmp_path.glob("tmp*"))


def test_long_texts_after_a_full_dictionary_are_decoded_in_bounded_memory(tmp_path: Path) -> None:
    """The dictionary has the short texts; the long ones, which the file compresses well, are written in full."""
    size, count = 2**20, 300
    short, long = texts(4000), [f"{number:04d}" + "s" * (size - 4) for number in range(count)]
    options = {"compression": "zstd", "dictionary_pagesize_limit": 32 * 1024}
    path = write(tmp_path / "uneven.parquet", {"prompt": texts(4000 + count), "note": short + long}, **options)
    whole = columns(path)
    chunk = whole.file.metadata.row_group(0).column(1)
    assert chunk.has_dictionary_page and chunk.total_uncompressed_size > 2 * parquet.DECODED_BYTES
    assert rows_at_a_time(whole, 0) * size <= parquet.DECODED_BYTES
    assert sum(batch.num_rows for batch in parquet._batches(whole)) == 4000 + count, "and no batch is refused"


@pytest.mark.parametrize("kept", [0, 2**30])
def test_every_value_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """In pieces of few rows, from several row groups, with categories, missing values, lists and numbers."""
    count = 1000
    kinds = pyarrow.array([None if n % 7 == 0 else f"kind {n % 5}" for n in range(count)]).dictionary_encode()
    given = {
        "kind": kinds,
        "prompt": texts(count),
        "n": [[n] * (n % 4) for n in range(count)],
        "weight": [None if n % 3 else n / 2 for n in range(count)],
    }
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", kept)
    monkeypatch.setattr(parquet, "MAX_ROWS", 7)
    monkeypatch.setattr(parquet, "CHUNK_ROWS", 50)
    path = write(tmp_path / "some.parquet", given, row_group_size=300)
    rows = TableRows(path, [path], "prompt")
    expected = pyarrow.table(given).to_pylist()
    assert list(rows.scan()) == expected == [rows.row(index) for index in range(count)]
    only = write(tmp_path / "only.parquet", {"prompt": pyarrow.array(texts(20)).dictionary_encode()})
    assert [row["prompt"] for row in TableRows(only, [only], "prompt").scan()] == texts(20)


def test_the_first_page_says_how_long_a_repeated_text_can_be(tmp_path: Path) -> None:
    for compression in ("none", "zstd"):
        path = write(tmp_path / "p.parquet", {"prompt": [LONG] * 100, "n": [1] * 100}, compression=compression)
        group = open_file(path).metadata.row_group(0)
        with path.open("rb") as opened:
            assert longest_value(opened, group.column(0)) == len(LONG) + 4  # and its length, in four bytes
            assert longest_value(opened, group.column(1)) == 0
    short = write(tmp_path / "short.parquet", {"prompt": ["x"] * 5000})
    long = write(tmp_path / "long.parquet", {"prompt": ["x" * 2**20] * 200})
    assert rows_at_a_time(columns(short), 0) == 1024
    assert rows_at_a_time(columns(long), 0) == 127


def test_what_cannot_be_decoded_in_bounded_memory_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "DECODED_BYTES", 2**20)
    path = write(tmp_path / "a.parquet", {"prompt": texts(3), "story": ["x" * 3 * 2**20] * 3})
    with pytest.raises(PromptError, match=r"a\.parquet: the different values of its column story take 3 MiB together"):
        load_data(DataConfig(train=str(path)), needs_target=False)
    # Lists of very different lengths: 300 rows at a time is what their average allows.
    lists = [[LONG] * (1000 if row == 5 else 0) for row in range(1000)]
    path = write(tmp_path / "b.parquet", {"prompt": texts(1000), "notes": lists})
    with pytest.raises(PromptError, match=r"b\.parquet, rows 0 to \d+: decoded, that is 8 MiB, and at most 1 MiB are"):
        load_data(DataConfig(train=str(path)), needs_target=False)


def test_columns_that_cannot_be_told_apart_or_read_are_named(tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(texts(2))] * 2, names=["prompt", "prompt"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(PromptError, match=r"twice\.parquet: several of its columns are called 'prompt'; each needs"):
        load_data(DataConfig(train=str(tmp_path / "twice.parquet")), needs_target=False)
    path = write(tmp_path / "bytes.parquet", {"prompt": [b"a"]})
    with pytest.raises(PromptError, match=r"data\.prompt_key=prompt is a column of bytes"):
        load_data(DataConfig(train=str(path)), needs_target=False)


def test_many_small_files_are_not_all_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / f"train-{part}-of-3.parquet", {"prompt": texts(100)}) for part in range(3)]
    one = pyarrow.table({"prompt": texts(100)}).nbytes
    copied = list[Path]()
    copy = parquet._copied

    def watched(read: ParquetColumns, batches: Any) -> Any:
        copied.append(read.path)
        return copy(read, batches)

    monkeypatch.setattr(parquet, "_copied", watched)
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 1.5 * one)
    assert len(load_data(DataConfig(train=str(tmp_path)), needs_target=False).train) > 200
    assert copied == files[1:]
