"""Tests of large files, whose rows stay on disk: the same prompts, and damage and changes are named."""

import json
import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.data.prompts import PromptError
from async_flowrl.types import Prompt
from tests.unit.data.prompt_files import lines, load, texts


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every file counts as large, so that its rows stay on disk; the folder of temporary files."""
    monkeypatch.setattr("async_flowrl.data.rows.IN_MEMORY_BYTES", 0)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


SOME: list[dict[str, Any]] = [{"prompt": f"ein schöner Prompt {i}", "tag": {"n": [i]}, "w": i % 3} for i in range(200)]


def some(folder: Path, kind: str) -> Path:
    """A file with some prompts; lines with blank ones between them, a byte order mark, and no line end at the end."""
    path = folder / f"some.{kind}"
    if kind == "parquet":
        with_picture = [{**row, "picture": b"..."} for row in SOME]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(with_picture), path, row_group_size=64)
        return path
    written = [row["prompt"] if kind == "txt" else json.dumps(row) for row in SOME]
    path.write_text("\ufeff" + written[0] + "\r\n \n" + "\n".join(written[1:]), encoding="utf-8", newline="")
    return path


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_large_file_is_the_same_prompts(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, settings = some(tmp_path, kind), {"held_out": 0.2, **({} if kind == "txt" else {"weight_key": "w"})}
    small = load(path, **settings)
    temporary = request.getfixturevalue("on_disk")
    large = load(path, **settings)
    assert (large.train.digest, large.evaluation.digest) == (small.train.digest, small.evaluation.digest)
    assert [large.train[i] for i in range(len(large.train))] == list(small.train) == list(large.train)
    assert [large.train.where(i) for i in (0, -1)] == [small.train.where(i) for i in (0, -1)]
    assert large.train.rows.left_out == (("picture",) if kind == "parquet" else ())
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_large_file_that_changes_under_a_run_is_noticed(kind: str, tmp_path: Path, on_disk: Path) -> None:
    path = some(tmp_path, kind)
    prompts = load(path, held_out=0).train
    last, before = len(prompts) - 1, path.read_bytes()
    expected = prompts[last]
    path.replace(tmp_path / "moved")
    path.write_text("another file\n")
    assert prompts[last - 1].text == SOME[last - 1]["prompt"]
    assert [prompt.text for prompt in prompts] == [row["prompt"] for row in SOME]
    with (tmp_path / "moved").open("r+b") as file:
        file.write(before.replace(b"Prompt 1", b"Prompt 2"))
    assert prompts[last] == expected, "it is still in the cache"
    with pytest.raises(PromptError, match=rf"some\.{kind}:199: this prompt has changed since the start; restore the"):
        prompts[last - 2]
    assert prompts[20].text == SOME[20]["prompt"], "this one has not changed"
    with pytest.raises(PromptError, match=rf"some\.{kind}:3: this prompt has changed since the start"):
        list(prompts)
    os.truncate(tmp_path / "moved", 40)
    with pytest.raises(PromptError, match="has changed since the start"):
        prompts[21]


def test_a_million_prompts_are_a_sequence_in_little_memory(tmp_path: Path) -> None:
    """Here 20,000: beside its text a prompt takes tens of bytes; as an object it would take ten times that."""
    count, text = 20_000, "a photo of a cat on a mat " * 3
    path = lines(tmp_path / "many.txt", *(f"{text}{i}" for i in range(count)))
    load(lines(tmp_path / "few.txt", "warm-up"))
    tracemalloc.start()
    data = load(path, held_out=0.1)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held - path.stat().st_size < 100 * count
    train = data.train
    assert isinstance(train[5], Prompt) and train[-1] == train[len(train) - 1] and train[2:4] == [train[2], train[3]]
    with pytest.raises(IndexError):
        train[len(train)]
    assert sorted(texts(train) + texts(data.evaluation), key=lambda t: int(t.split()[-1])) == [
        f"{text}{i}" for i in range(count)
    ]
