"""Tests of docs/guarantees.md: the tests that a promise names exist, and are run by `make test` or as the row says."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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


def test_every_test_of_a_promise_is_run_by_the_command_that_its_row_names() -> None:
    assert len(ROWS) > 75
    assert [row for row, cited in ROWS if not cited] == [], "they name no test"
    every = [each for _, cited in ROWS for each in cited]
    assert [file for file, _, _ in every if not (ROOT / file).is_file()] == [], "they do not exist"
    assert [sentence for each in every if (sentence := fault(in_file(each[0]), each))] == []
