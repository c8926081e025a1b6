"""Tests of loading prompts by a configuration: folders, weights, digests, and prompts that are refused."""

import json
import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_flowrl.data.load import held_out, held_out_by_default
from async_flowrl.data.prompts import MAX_CHARACTERS, PromptError, digest, text_key
from async_flowrl.data.store import digest_of, shared_texts
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


@pytest.mark.extended
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


def test_a_file_of_64_prompts_holds_out_8_and_a_smaller_one_none(tmp_path: Path) -> None:
    small = load(lines(tmp_path / "small.txt", *(f"prompt {i}" for i in range(63)), "prompt 0"))
    assert len(small.train) == 64 and small.evaluation is small.train and "none are held out" in small.chosen
    large = load(lines(tmp_path / "large.txt", *(f"prompt {i}" for i in range(64))))
    assert (len(large.train), len(large.evaluation)) == (56, 8)
    assert shared_texts(large.evaluation, large.train) == 0
    larger = load(lines(tmp_path / "larger.txt", *(f"prompt {i}" for i in range(500))))
    assert (len(larger.train), len(larger.evaluation)) == (484, 16)
    whole = load(tmp_path / "larger.txt", held_out=0)
    assert len(whole.train) == len(whole.evaluation) == 500
    assert [prompt.index for prompt in larger.train] == list(range(484))


def test_a_test_file_of_its_own_is_used_and_nothing_is_held_out(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.txt", *(f"prompt {i}" for i in range(100)))
    test = lines(tmp_path / "test.txt", "prompt 3", "another")
    data = load(train, evaluation=str(test))
    assert len(data.train) == 100 and texts(data.evaluation) == ["prompt 3", "another"]
    assert shared_texts(data.evaluation, data.train) == 1
    with pytest.raises(PromptError, match=r"data\.held_out=0\.1 takes .* but data\.evaluation=.* gives them, too"):
        load(train, evaluation=str(test), held_out=0.1)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=400), st.floats(0, 0.9), st.integers(0, 3))
def test_the_text_decides_alone(numbers: list[int], share: float, seed: int) -> None:
    """So duplicates are on one side, and what a file had before it grew stays on its side."""
    keys = np.array([text_key(Prompt(number, f"prompt {number}")) for number in numbers], np.uint64)
    out = held_out(keys, share, seed)
    side = dict(zip(numbers, out.tolist(), strict=True))
    assert [side[number] for number in numbers] == out.tolist()
    assert held_out(keys[: len(keys) // 2], share, seed).tolist() == out[: len(keys) // 2].tolist()
    chosen = held_out_by_default(keys, seed)
    assert (chosen is None) == (len(side) < 64)
    if chosen is not None:
        assert len({number for number, is_out in zip(numbers, chosen.tolist(), strict=True) if is_out}) == min(
            16, len(side) // 8
        )


def test_share_and_seed(tmp_path: Path) -> None:
    path = lines(tmp_path / "train.txt", *(f"prompt {i}" for i in range(2000)))
    tenth, other = load(path, held_out=0.1), load(path, held_out=0.1, held_out_seed=1)
    assert 150 < len(tenth.evaluation) < 250 and len(tenth.train) + len(tenth.evaluation) == 2000
    assert 0 < shared_texts(tenth.evaluation, other.evaluation) < 60
    with pytest.raises(PromptError, match=r"of the 1 prompts of .* leaves none to (evaluate|train on)"):
        load(lines(tmp_path / "one.txt", "alone"), held_out=0.5)
