"""Tests of docs/guarantees.md: every promise names a test that exists, and one of them runs in the default lane."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
CITED = re.compile(r"`(tests/[\w/]+\.py|…)(?:::(\w+))?`")
"""A file, or one of its tests; … is the file that was named last."""
LEFT_OUT = {"slow", "gpu", "pretend_gpu", "nodes"}
"""Marks that the default lane leaves out (`addopts` of pyproject.toml)."""
IN_SLOW = "(`make test-slow`)"
"""Said in the row of what takes too long to be tested by default."""


def rows(page: str) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """(row, its (file, test or None)) of the tables whose last column is the test."""
    within, file = False, ""
    for line in page.splitlines():
        if not line.startswith("|"):
            within = False
        elif re.search(r"\| test \|$", line):
            within = True
        elif within and not line.startswith("|---"):
            found = []
            for path, test in CITED.findall(line):
                file = file if path == "…" else path
                found.append((file, test or None))
            yield line, found


ROWS = list(rows(PAGE.read_text(encoding="utf-8")))


@cache
def in_file(file: str) -> dict[str, bool]:
    """Test → whether it is in the default lane, at least with some parameters."""
    return default_lane((ROOT / file).read_text(encoding="utf-8"))


def default_lane(source: str) -> dict[str, bool]:
    tree = ast.parse(source)
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign) and _is_mark(node)]
    module = not any(f"mark.{left}" in mark for mark in marks for left in LEFT_OUT)
    return {
        node.name: module and not LEFT_OUT & {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def _is_mark(node: ast.Assign) -> bool:
    return [ast.unparse(target) for target in node.targets] == ["pytestmark"]


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: ROWS[number][0][2:50].strip())
def test_a_promise_has_tests_and_one_of_them_by_default(number: int) -> None:
    row, cited = ROWS[number]
    assert cited, f"names no test: {row}"
    by_default = []
    for file, test in cited:
        assert (ROOT / file).is_file(), f"{file} does not exist: {row}"
        assert test is None or test in in_file(file), f"{file} has no {test}: {row}"
        by_default += [there for name, there in in_file(file).items() if test in (None, name)]
    assert any(by_default) or IN_SLOW in row, f"only slow tests: {row}"


def test_the_table_is_found_and_the_check_can_fail() -> None:
    assert len(ROWS) > 35
    slow = "import pytest\npytestmark = pytest.mark.slow\ndef test_a(): ...\n"
    some = "import pytest\n@pytest.mark.slow\ndef test_a(): ...\ndef test_b(): ...\n"
    assert default_lane(slow) == {"test_a": False} and default_lane(some) == {"test_a": False, "test_b": True}
    nodes = "import pytest\npytestmark = [pytest.mark.nodes, pytest.mark.serial]\ndef test_a(): ...\n"
    gpu = "import pytest\n@pytest.mark.gpu\ndef test_a(): ...\n"
    assert default_lane(nodes) == default_lane(gpu) == {"test_a": False}
    page = "| what | test |\n|---|---|\n| one | `tests/a.py::test_a` |\n| two | `…::test_b` |\n| three | trust us |\n"
    assert [cited for _, cited in rows(page)] == [[("tests/a.py", "test_a")], [("tests/a.py", "test_b")], []]
