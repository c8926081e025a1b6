"""Tests of docs/guarantees.md: the tests that a promise names exist, and are run by `make test` or as the row says."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.lanes import DEFAULT, NOWHERE, commands_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
CITED = re.compile(r"`(tests/[\w/]+\.py|…)(?:::(\w+))?`(?: \(`(make [\w-]+)`\))?")
"""A file or one of its tests, and the command that runs it if `make test` does not; … is the file named last."""
Cited = tuple[str, str | None, str | None]
"""File, test (None: all of the file), command (None: `make test`)."""


def rows(page: str) -> Iterator[tuple[str, list[Cited]]]:
    """(row, what it cites) of the tables whose last column is the test; what other columns cite counts as well."""
    within, file = False, ""
    for line in page.splitlines():
        if not line.startswith("|"):
            within = False
        elif re.search(r"\| test \|$", line):
            within = True
        elif within and not line.startswith("|---"):
            cited = []
            for path, test, command in CITED.findall(line):
                file = file if path == "…" else path
                cited.append((file, test or None, command or None))
            yield line, cited


ROWS = list(rows(PAGE.read_text(encoding="utf-8")))


@cache
def in_file(file: str) -> dict[str, set[str]]:
    return commands_of(file, (ROOT / file).read_text(encoding="utf-8"))


def fault(tests: dict[str, set[str]], cited: Cited) -> str | None:
    """What is wrong with a citation of a file that has `tests`, or None.

    Of a file that is cited as a whole, one test in `make test` is enough.
    """
    file, test, command = cited
    if test is not None and test not in tests:
        return f"{file} has no {test}"
    runs = set().union(*(commands for name, commands in tests.items() if test in (None, name)))
    if DEFAULT in runs:
        return f"{file}::{test} is in `{DEFAULT}`, but marked `{command}`" if command else None
    if command in runs - {NOWHERE}:
        return None
    return f"{file}::{test} is run by {', '.join(sorted(runs))}, and its row says `{command or DEFAULT}`"


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: ROWS[number][0][2:50].strip())
def test_every_test_of_a_promise_is_run_by_the_command_that_its_row_names(number: int) -> None:
    row, cited = ROWS[number]
    assert cited, f"names no test: {row}"
    missing = [file for file, _, _ in cited if not (ROOT / file).is_file()]
    assert not missing, f"{missing} do not exist: {row}"
    faults = [sentence for each in cited if (sentence := fault(in_file(each[0]), each))]
    assert not faults, f"{faults}: {row}"


def test_the_table_is_found() -> None:
    assert len(ROWS) > 75
    page = "| what | test |\n|---|---|\n| one | `tests/a.py::test_a` |\n"
    page += "| two | `…::test_b` (`make test-slow`) |\n| three | trust us |\n"
    assert [cited for _, cited in rows(page)] == [
        [("tests/a.py", "test_a", None)],
        [("tests/a.py", "test_b", "make test-slow")],
        [],
    ]


SLOW, SKIPPED = "@pytest.mark.slow", "@pytest.mark.skipif(not shutil.which('x'), reason='no x')"
PARAM = "pytest.param(1, marks=pytest.mark.slow)"


@pytest.mark.parametrize(
    ("above", "commands"),
    [
        ("", {"make test"}),
        (SLOW, {"make test-slow"}),
        ("slow = pytest.mark.slow\n@slow", {"make test-slow"}),
        ("pytestmark = [pytest.mark.nodes, pytest.mark.serial]", {"make test-nodes"}),
        ("pytestmark = [pytest.mark.nodes, pytest.mark.slow]", {"make test-slow"}),
        ("@pytest.mark.gpu", {"make test-gpu"}),
        (f"@pytest.mark.parametrize('a', [{PARAM}])", {"make test-slow"}),
        (f"@pytest.mark.parametrize('a', [{PARAM}, 2])", {"make test", "make test-slow"}),
        (f"@pytest.mark.parametrize('a', [1, 2])\n@pytest.mark.parametrize('b', [{PARAM}])", {"make test-slow"}),
        (f"CASES = ({PARAM},)\n@pytest.mark.parametrize('a', CASES)", {"make test-slow"}),
        (f"@pytest.mark.parametrize('a', [a if a else {PARAM} for a in A])", {"make test", "make test-slow"}),
        (SKIPPED, {NOWHERE}),
        ("@pytest.mark.skipif(torch.cuda.is_available(), reason='on a GPU')", {"make test"}),
        ("@pytest.mark.xfail", {NOWHERE}),
    ],
)
def test_the_command_is_read_from_the_marks(above: str, commands: set[str]) -> None:
    assert commands_of("tests/unit/test_x.py", f"{above}\ndef test_a(): ...\n") == {"test_a": commands}
    if above.startswith("@"):
        assert commands_of("tests/x.py", f"{above}\ndef test_a(): ...\ndef test_b(): ...\n")["test_b"] == {"make test"}


def test_a_mark_may_come_from_the_folder_and_an_imported_one_is_refused() -> None:
    assert commands_of("tests/pretend_gpu/test_x.py", "def test_a(): ...") == {"test_a": {"make test-pretend-gpu"}}
    slow = commands_of("tests/pretend_gpu/test_x.py", "@pytest.mark.slow\ndef test_a(): ...")
    assert slow == {"test_a": {"make test-slow"}}
    with pytest.raises(ValueError, match="needs_root is imported"):
        commands_of("tests/x.py", "from a import needs_root\n@needs_root\ndef test_a(): ...")


def test_a_row_is_refused_for_one_slow_test_beside_others_and_for_a_mark_that_is_not_its_own() -> None:
    tests = {"test_a": {DEFAULT}, "test_b": {"make test-slow"}, "test_c": {NOWHERE}}
    allowed: list[Cited] = [("f", "test_a", None), ("f", "test_b", "make test-slow"), ("f", None, None)]
    assert [fault(tests, cited) for cited in allowed] == [None] * 3
    refused: list[Cited] = [("f", "test_b", None), ("f", "test_a", "make test-slow"), ("f", "test_c", "no command")]
    assert all(fault(tests, cited) for cited in [*refused, ("f", "test_d", None), ("f", "test_b", "make test-gpu")])
