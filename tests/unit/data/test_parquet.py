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


TEXTS = [f"a cat {number}" for number in range(ROWS)]
PREFIXES = {"use_dictionary": False, "column_encoding": {"prompt": "PLAIN", "system_prompt": "DELTA_BYTE_ARRAY"}}


def messages() -> dict[str, Any]:
    """verl's layout: the same long system prompt in every row's messages."""
    system = {"role": "system", "content": LONG}
    return {"prompt": [[system, {"role": "user", "content": text}] for text in TEXTS]}


def column(categories: bool = False) -> dict[str, Any]:
    texts = pyarrow.array([LONG] * ROWS)
    return {"prompt": TEXTS, "system_prompt": texts.dictionary_encode() if categories else texts}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("given", "options"),
    [(column, {}), (messages, {}), (column, PREFIXES), (lambda: column(categories=True), {})],
    ids=["column", "messages", "prefixes", "categories"],
)
def test_long_repeated_texts_are_decoded_in_bounded_memory(
    tmp_path: Path, given: Callable[[], dict[str, Any]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "repeated.parquet"
    pyarrow.parquet.write_table(pyarrow.table(given()), path, **options)
    assert path.stat().st_size < BOUND / 50 and DECODED > 2 * BOUND
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with counted() as pool:
        data = load_data(DataConfig(train=str(path), held_out=0.01), needs_target=False)
        assert len(data.train) + len(data.evaluation) == ROWS
        assert len(data.train[len(data.train) - 1].system or "") == len(LONG)
        assert 0 < pool.max_memory() < BOUND
    assert not list(tmp_path.glob("tmp*"))
