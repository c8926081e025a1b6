"""Tests of `async-flowrl data FILE`: its report on a file, and its exit code."""

from pathlib import Path

import pytest

from async_flowrl.__main__ import VERBS
from async_flowrl.cli.data import main


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out + err


def test_a_good_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "signs.txt"
    path.write_text("".join(f'a sign that says "WORD {i % 90}"\n' for i in range(100)))
    code, page = shown(capsys, str(path), "--reward", "ocr")
    assert code == 0
    for part in (
        "100 of 100 rows can be read, 10 of them duplicates by text",
        "held out, of the same file by default",
        "longest    26 characters",
        f"{path}:1\n    prompt: 'a sign that says \"WORD 0\"'\n    target: 'WORD 0'",
        "refused    nothing",
    ):
        assert part in page
    assert "held out, of the same file by data.held_out=0.5" in shown(capsys, str(path), "--held-out", "0.5")[1]
    assert VERBS["data"][0] == "cli.data"


def test_all_refusals_are_listed_and_the_exit_code_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": "a", "w": 1, "tag": "t", "include": []}\n{"prompt": 3, "w": 1}\nnot JSON\n'
        '{"prompt": "b\\u0000", "w": 1}\n{"prompt": "c"}\n{"prompt": "d", "w": 0}\n'
    )
    code, page = shown(capsys, str(path), "--weight-key", "w")
    assert code == 2
    assert "2 of 6 rows can be read" in page and "refused    4 rows" in page
    for line, said in ((2, "expected text"), (3, "not JSON"), (4, "U+0000"), (5, "data.weight_key must be one of")):
        assert f"{path}:{line}: " in page and said in page
    assert "w → the weight, in 4 of 6 rows" in page
    assert "tag → metadata, for the reward, in 1 of 6 rows" in page
    assert "0 to 1, 0.5 on average" in page
