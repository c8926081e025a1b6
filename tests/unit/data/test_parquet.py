"""Tests of parquet files: in whatever way texts are written, they are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.config.schema import DataConfig
from async_flowrl.data.load import load_data

ROWS = 1400
LONG = "s" * 4096


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
def test_long_repeated_texts_are_read(
    tmp_path: Path, given: Callable[[], dict[str, Any]], options: dict[str, Any]
) -> None:
    path = tmp_path / "repeated.parquet"
    pyarrow.parquet.write_table(pyarrow.table(given()), path, **options)
    data = load_data(DataConfig(train=str(path), held_out=0.01), needs_target=False)
    prompts = [*data.train, *data.evaluation]
    assert sorted(prompt.text for prompt in prompts) == sorted(texts())
    assert {prompt.system for prompt in prompts} == {LONG}
