"""Frozen digests of prompts as they are read from each kind of file: a checkpoint holds them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.unit.data.prompt_files import load

ROWS: list[dict[str, Any]] = [
    {"prompt": 'ein "Schild"', "n": 1, "x": 0.5, "deep": {"a": [1, None, {"b": "ü"}], "c": {}}, "w": 1},
    {"prompt": "null everywhere", "n": None, "x": None, "deep": None, "w": 0.25},
    {"prompt": "absent keys", "w": 3},
    {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "said"}], "target": "t", "w": 1},
    {"prompt": " 界 of spaces ", "negative_prompt": "", "height": 32, "width": 64, "w": 2, "flag": True},
    {"prompt": "tokens", "prompt_token_ids": [1, 2, 3], "reward_model": {"ground_truth": "g", "style": None}, "w": 1},
]
MIXED: list[dict[str, Any]] = [
    {"prompt": f"mixed {value!r}", "x": value} for value in (1, "1", 1.0, [1], {"1": 1}, None)
]
"""Values of one name and several types, which only jsonl can hold."""
PLAIN: list[dict[str, Any]] = [
    {"prompt": 'ein "Schild"', "n": 1, "x": 0.5, "deep": {"a": [1, None], "b": {"c": "ü"}}, "w": 1.0},
    {"prompt": "null everywhere", "n": None, "x": None, "deep": None, "w": 0.25},
    {"prompt": "absent keys", "w": 3.0},
    {"prompt": " 界 of spaces ", "negative_prompt": "", "height": 32, "width": 64, "w": 2.0, "flag": True},
    {"prompt": "tokens", "prompt_token_ids": [1, 2, 3], "reward_model": {"ground_truth": "g", "style": None}, "w": 1.0},
]
"""Rows that a table can hold: a column has one type."""
CHAT: list[dict[str, Any]] = [
    {
        "data_source": "ocr",
        "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": f'a sign "{n}"'}],
        "reward_model": {"style": "model", "ground_truth": str(n) if n else None},
        "extra_info": {"index": n, "split": "train", "tags": ["a"] * n},
    }
    for n in range(4)
]


def txt(folder: Path) -> Path:
    path = folder / "p.txt"
    path.write_bytes('\ufeffein "Schild"\r\n\n  \nzwei\n\u00a0\ndrei'.encode())
    return path


def jsonl(folder: Path) -> Path:
    path = folder / "p.jsonl"
    written = "\n".join(json.dumps(row, ensure_ascii=False) for row in [*ROWS, *({"w": 1, **row} for row in MIXED)])
    path.write_text("\ufeff" + written, encoding="utf-8")
    return path


def parquet(folder: Path) -> Path:
    table = table_of([{**row, "picture": b"..."} for row in PLAIN])
    coded = pyarrow.array(["a", None, "b", "a", "b"]).dictionary_encode()
    pyarrow.parquet.write_table(table.append_column("kind", coded), folder / "p.parquet", row_group_size=3)
    return folder / "p.parquet"


def table_of(rows: list[dict[str, Any]]) -> pyarrow.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pyarrow.table({name: [row.get(name) for row in rows] for name in names})


def chat(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(CHAT), folder / "train.parquet")
    return folder / "train.parquet"


def parts(folder: Path) -> Path:
    """Two files whose columns differ: what one lacks is null."""
    (folder / "data").mkdir()
    for number, rows in enumerate((PLAIN[:2], PLAIN[2:])):
        path = folder / "data" / f"train-0000{number}-of-00002.parquet"
        pyarrow.parquet.write_table(table_of(rows), path)
    return folder


def arrow(folder: Path) -> Path:
    table = table_of(PLAIN)
    with pyarrow.ipc.new_stream(folder / "data.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


@pytest.mark.parametrize(
    ("write", "count", "expected"),
    [
        (txt, 3, "24f4ba643ed77b5c1801e7970f19bd23"),
        (jsonl, 12, "a64813dd583074f2782271b68fb1b007"),
        (parquet, 5, "b6cececcb8483058780188bda6269ae7"),
        (chat, 4, "1744f63c7cde86cd67209049b4fcc2e5"),
        (parts, 5, "3c453e89fb5d108551999430028b45b9"),
        (arrow, 5, "3c453e89fb5d108551999430028b45b9"),
    ],
)
def test_digests_are_those_of_earlier_checkpoints(
    write: Callable[[Path], Path], count: int, expected: str, tmp_path: Path
) -> None:
    weighted = {} if write in (txt, chat) else {"weight_key": "w"}
    prompts = load(write(tmp_path), held_out=0, **weighted).train
    assert (len(prompts), prompts.digest) == (count, expected)
    assert [prompts[index] for index in range(len(prompts))] == list(prompts)
