"""Tests of prompt files: their contents, and refusals that name file and line."""

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.config.paths import config_dir, find_data
from async_flowrl.data.prompts import PromptError, quoted_target
from async_flowrl.types import Prompt
from tests.unit.data.prompt_files import load, rows, texts


def test_token_ids_stay_beside_the_text(tmp_path: Path) -> None:
    columns: list[dict[str, Any]] = [
        {"prompt": "a cat", "prompt_token_ids": [5, 6, 7], "negative_token_ids": None},
        {"prompt": "a dog", "prompt_token_ids": None, "negative_token_ids": [0]},
    ]
    cat, dog = load(rows(tmp_path / "rows.jsonl", *columns)).train
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), tmp_path / "rows.parquet")
    assert [cat, dog] == list(load(tmp_path / "rows.parquet").train)
    assert (cat.token_ids, cat.negative_token_ids, cat.metadata) == ((5, 6, 7), None, {})
    assert (dog.token_ids, dog.negative_token_ids) == (None, (0,))
    assert [p.wording for p in (cat, dog)] == [(5, 6, 7), "a dog"]
    assert [p.negative_wording("grey") for p in (cat, dog, Prompt(2, "", negative=""))] == ["grey", (0,), ""]


def test_another_prompt_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"caption": ["a cat"]}), path)
    assert texts(load(path, prompt_key="caption").train) == ["a cat"]
    with pytest.raises(PromptError, match=r"data.prompt_key must be one of caption, got 'captoin'; did you mean 'cap"):
        load(path, prompt_key="captoin")


@pytest.mark.parametrize(
    ("text", "target"),
    [('say "Hi there"', "Hi there"), ("say “Hi”", "Hi"), ('an "" empty one', None), ('one " alone', None), ("", None)],
)
def test_quoted_target(text: str, target: str | None) -> None:
    assert quoted_target(text) == target


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("empty.txt", "\n  \n", ""),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n', ":2"),
        ("twice.jsonl", '{"prompt": "a", "m": {"k": 1, "k": 1}}\n', ":1"),
        ("mac.txt", "one\rtwo\rthree\r", ":1"),
        ("missing.jsonl", '{"prompts": "a"}\n', ":1"),
        ("nul.txt", "a cat\nnul \0 here\n", ":2"),
        ("long.txt", "x" * 40_000, ":1"),
        ("number.jsonl", '{"prompt": 3}\n', ":1"),
        ("target.jsonl", '{"prompt": "a", "target": 3}\n', ":1"),
        ("chat.jsonl", '{"prompt": [{"role": "assistant", "content": "a"}]}\n', ":1"),
        ("image.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}\n', ":1"),
        ("ids.jsonl", '{"prompt": "a"}\n{"prompt": "a", "prompt_token_ids": [1, -1]}\n', ":2"),
        ("data.csv", "prompt\na\n", ""),
        ("data.json", '[{"prompt": "a"}]', ".*jq.*data.jsonl"),
        ("array.jsonl", '[{"prompt": "a"}]', r":1\b"),
        ("fake.parquet", "hello", ""),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path: Path, name: str, content: str, line: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=re.escape(str(tmp_path / name)) + line) as error:
        load(tmp_path / name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_the_working_directory_comes_before_the_shipped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_data("prompts/two_prompts.txt") == config_dir() / "prompts/two_prompts.txt"
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "two_prompts.txt").write_text("mine\n")
    assert find_data("prompts/two_prompts.txt") == tmp_path / "prompts/two_prompts.txt"
    assert texts(load("~/prompts/two_prompts.txt").train) == ["mine"]
