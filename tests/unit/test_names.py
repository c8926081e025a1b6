"""Tests of the names in the packages: a variable is named for what it holds, so none is called `found`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VAGUE = {"found"}
"""Names that say how a value was got and not what it is."""
NOT_YET = {
    *(f"async_flowrl/{folder}" for folder in ("benchmark", "controller", "observability", "plan", "report", "shared")),
}
"""Folders in which such names still stand."""
FILES = [
    path
    for package in ("async_flowrl", "checkpoint_engine", "separation")
    for path in sorted((ROOT / package).rglob("*.py"))
    if not any(path.is_relative_to(ROOT / folder) for folder in NOT_YET)
]


def vague(source: str) -> list[int]:
    """Lines that bind a vague name: a variable, a parameter, a loop's or a comprehension's variable."""
    nodes = list(ast.walk(ast.parse(source)))
    variables = [node.lineno for node in nodes if isinstance(node, ast.Name) and _binds(node) and node.id in VAGUE]
    return variables + [node.lineno for node in nodes if isinstance(node, ast.arg) and node.arg in VAGUE]


def _binds(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def test_no_variable_has_a_name_that_does_not_say_what_it_holds() -> None:
    assert len(FILES) > 200
    lines = [f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in vague(path.read_text(encoding="utf-8"))]
    assert not lines, f"name these variables for what they hold: {', '.join(lines)}"


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "if (found := f()): ...",
        "[found for found in x]",
        "def f(found): ...",
        "a, found = x",
        "lambda found: 1",
    ],
)
def test_a_vague_name_is_seen_wherever_it_is_bound(source: str) -> None:
    assert vague(source) == [1]
    assert not vague(source.replace("found", "sizes"))
