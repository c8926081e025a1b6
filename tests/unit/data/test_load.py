"""Tests of loading prompts by a configuration: folders, weights, digests, and prompts that are refused."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from async_flowrl.data.prompts import MAX_CHARACTERS, PromptError, digest
from async_flowrl.data.store import digest_of
from async_flowrl.types import Prompt
from tests.unit.data.prompt_files import lines, load, rows, texts

HF_DATASET = Path(__file__).parent / "hf_dataset"
"""A DatasetDict that `datasets` 5.2 wrote: train in two files, test in one."""


def test_flow_grpos_folders(tmp_path: Path) -> None:
    ocr, geneval = tmp_path / "ocr", tmp_path / "geneval"
    lines(ocr / "train.txt", 'a sign "A"', 'a mug "B"')
    lines(ocr / "test.txt", 'a bus "C"')
    data = load(ocr)
    assert [p.target for p in data.train] == ["A", "B"] and [p.target for p in data.evaluation] == ["C"]
    assert data.chosen == f"of {ocr / 'test.txt'}"
    geneval.mkdir()
    row = {"tag": "counting", "include": [{"class": "cat", "count": 2}], "exclude": [], "prompt": "two cats"}
    rows(geneval / "train_metadata.jsonl", row)
    (prompt,) = load(geneval).train
    assert prompt == Prompt(0, "two cats", metadata={name: row[name] for name in ("tag", "include", "exclude")})
    lines(ocr / "train.jsonl", "{}")
    with pytest.raises(PromptError, match=r"several files of the split 'train' \(train\.txt, train\.jsonl\)"):
        load(ocr)
    with pytest.raises(PromptError, match=r"holds no split train as txt, .*; it has empty\.csv"):
        load(lines(tmp_path / "other" / "empty.csv").parent)


def test_hugging_face_datasets_on_disk() -> None:
    data = load(HF_DATASET)
    assert texts(data.train) == [f'a sign "W{i}"' for i in range(6)]
    assert data.train[4] == Prompt(4, 'a sign "W4"', target="W4", metadata={"tag": "t", "n": 4})
    assert texts(data.evaluation) == ['a sign "W1"', 'a sign "W3"']
    assert data.train.where(4).endswith("data-00001-of-00002.arrow, row 1")
    assert texts(load(HF_DATASET / "train", evaluation=str(HF_DATASET / "test")).evaluation) == texts(data.evaluation)


def test_parquet_in_parts_as_the_hub_has_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for part in range(2):
        table = pyarrow.Table.from_pylist([{"prompt": f"{part} {i}", "picture": b"bytes"} for i in range(2)])
        pyarrow.parquet.write_table(table, tmp_path / "data" / f"train-0000{part}-of-00002.parquet")
    train = load(tmp_path).train
    assert texts(train) == ["0 0", "0 1", "1 0", "1 1"]
    assert train[3].metadata == {} and train.rows.left_out == ("picture",)


def test_what_verl_omni_writes(tmp_path: Path) -> None:
    row = {
        "data_source": "flow_grpo/ocr",
        "prompt": [{"role": "system", "content": ""}, {"role": "user", "content": 'a sign "Open"'}],
        "negative_prompt": [{"role": "system", "content": ""}, {"role": "user", "content": " "}],
        "ability": "ocr",
        "reward_model": {"style": "model", "ground_truth": "Open"},
        "extra_info": {"split": "train", "index": 0, "raw_prompt": 'a sign "Open"'},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (prompt,) = load(tmp_path).train
    assert (prompt.text, prompt.negative, prompt.system, prompt.target) == ('a sign "Open"', " ", None, "Open")
    assert prompt.metadata == {name: row[name] for name in ("data_source", "ability", "reward_model", "extra_info")}


def test_weights(tmp_path: Path) -> None:
    path = rows(tmp_path / "w.jsonl", {"prompt": "a", "w": 2}, {"prompt": "b", "w": 0.5}, {"prompt": "c", "w": 0})
    train = load(path, weight_key="w").train
    assert train.weights is not None and train.weights.tolist() == [2.0, 0.5, 0.0]
    assert train[0].metadata == {} and load(path).train[0].metadata == {"w": 2}
    for row in ({"prompt": "a"}, *({"prompt": "a", "w": wrong} for wrong in (-1, "1", 10**400, float("nan"), 0))):
        with pytest.raises(PromptError):
            load(rows(tmp_path / "bad.jsonl", row), weight_key="w")


def test_the_digest_is_of_everything_in_the_prompts_and_of_their_order(tmp_path: Path) -> None:
    def of(*columns: dict[str, Any], **settings: Any) -> str:
        return load(rows(tmp_path / "rows.jsonl", *columns), **settings).train.digest

    first, second = {"prompt": "a", "target": "x", "n": {"p": 1, "q": 2}}, {"prompt": "b"}
    before = of(first, second)
    assert before == of({"n": {"q": 2, "p": 1}, "target": "x", "prompt": " a "}, second)
    changed = [
        of(second, first),
        of(first),
        of(first, second, second),
        *(
            of(first | {name: "other"}, second)
            for name in ("prompt", "target", "negative_prompt", "system_prompt", "n")
        ),
        of(first | {"prompt_token_ids": [1]}, second),
        of(first | {"w": 1}, second | {"w": 1}, weight_key="w"),
        of(first | {"w": 2}, second | {"w": 1}, weight_key="w"),
    ]
    assert len({before, *changed}) == 1 + len(changed)
    train = load(rows(tmp_path / "rows.jsonl", first, second)).train
    assert digest_of(train) == digest_of(list(train)) == before
    assert digest(train[0]) != digest(train[1])


@pytest.mark.parametrize("column", ["prompt", "target", "negative_prompt", "system_prompt"])
def test_other_columns_are_looked_at_too(tmp_path: Path, column: str) -> None:
    for value, message in (
        ("a\0b", r"U\+0000"),
        ("half \ud800 pair", r"U\+D800"),
        ("x" * (MAX_CHARACTERS + 1), "32,769"),
    ):
        with pytest.raises(PromptError, match=rf"rows\.jsonl:1: the {column[:6]}.*{message}"):
            load(rows(tmp_path / "rows.jsonl", {"prompt": "a", column: value}))
    fine = "tab\there, a line\nbreak, ünïcode 文字 🎨"
    assert load(rows(tmp_path / "rows.jsonl", {"prompt": fine})).train[0].text == fine


def test_lines_are_counted_as_editors_do(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffone\r\n\r\n  \n\u3000\ntwo\r\nno end".encode())
    train = load(tmp_path / "p.txt").train
    assert texts(train) == ["one", "two", "no end"]
    assert [train.where(index).rpartition(":")[2] for index in range(3)] == ["1", "5", "6"]
    assert train.duplicates == 0
    assert load(lines(tmp_path / "twice.txt", "a", "b", "a", "a")).train.duplicates == 2
