"""Tests of parquet files: little memory for what decodes to much, and refusals by name."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.data.rows import TableRows

ROWS = 14_000
LONG = "s" * 4096
DECODED = ROWS * len(LONG)
"""Bytes of one of the files below once it is decoded: 57 MB, of files of less than 200 kB."""
BOUND = 28e6
"""Allowed peak: the pieces that are on their way."""
POOLS: list[pyarrow.MemoryPool] = []
"""The pools of `counted`: each has to outlive what is in its memory."""


@contextmanager
def counted() -> Iterator[pyarrow.MemoryPool]:
    """pyarrow's memory within the block alone: this pool counts what it asks of the usual one."""
    usual = pyarrow.default_memory_pool()
    POOLS.append(pyarrow.proxy_memory_pool(usual))
    pyarrow.set_memory_pool(POOLS[-1])
    try:
        yield POOLS[-1]
    finally:
        pyarrow.set_memory_pool(usual)


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def texts(count: int = ROWS) -> list[str]:
    return [f"a cat {number}" for number in range(count)]


def column() -> dict[str, Any]:
    return {"prompt": texts(), "system_prompt": [LONG] * ROWS}


def messages() -> dict[str, Any]:
    """verl's layout: the same long system prompt in every row's messages."""
    system = {"role": "system", "content": LONG}
    return {"prompt": [[system, {"role": "user", "content": text}] for text in texts()]}


def categories() -> dict[str, Any]:
    return {"prompt": texts(), "system_prompt": pyarrow.array([LONG] * ROWS).dictionary_encode()}


PREFIXES = {"use_dictionary": False, "column_encoding": {"prompt": "PLAIN", "system_prompt": "DELTA_BYTE_ARRAY"}}


@pytest.mark.parametrize(
    ("given", "options"),
    [(column, {}), (messages, {}), (column, PREFIXES), (categories, {})],
    ids=["column", "messages", "prefixes", "categories"],
)
def test_long_repeated_texts_are_decoded_in_bounded_memory(
    tmp_path: Path, given: Callable[[], dict[str, Any]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "repeated.parquet", given(), **options)
    assert path.stat().st_size < BOUND / 50 and DECODED > 2 * BOUND
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with counted() as pool:
        data = load_data(DataConfig(train=str(path), held_out=0.01), needs_target=False)
        assert len(data.train) + len(data.evaluation) == ROWS
        assert len(data.train[len(data.train) - 1].system or "") == len(LONG)
        assert 0 < pool.max_memory() < BOUND
    assert not list(tmp_path.glob("tmp*"))


def test_every_value_is_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of few rows, from several row groups, with categories, missing values, lists and numbers."""
    count = 1000
    kinds = pyarrow.array([None if n % 7 == 0 else f"kind {n % 5}" for n in range(count)]).dictionary_encode()
    given = {
        "kind": kinds,
        "prompt": texts(count),
        "n": [[n] * (n % 4) for n in range(count)],
        "weight": [None if n % 3 else n / 2 for n in range(count)],
    }
    monkeypatch.setattr("async_flowrl.data.rows.BATCH_ROWS", 7)
    path = write(tmp_path / "some.parquet", given, row_group_size=300)
    rows = TableRows(path, [path], "prompt")
    expected = pyarrow.table(given).to_pylist()
    assert list(rows.scan()) == expected == [rows.row(index) for index in range(count)]
    only = write(tmp_path / "only.parquet", {"prompt": pyarrow.array(texts(20)).dictionary_encode()})
    assert [row["prompt"] for row in TableRows(only, [only], "prompt").scan()] == texts(20)
