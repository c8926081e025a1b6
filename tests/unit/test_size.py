"""`make size`: what it counts as code, as docstrings and as a room."""

from pathlib import Path

import pytest

from benchmarks import visited
from benchmarks.size import Count, count, room_of

SOURCE = '''"""A module
of two lines."""

import os  # a comment behind code

# a comment alone
NAME = "x"
"""What it is."""


def text() -> str:
    return """a string
that is code"""
'''


def test_code_is_neither_blank_nor_comment_nor_docstring() -> None:
    assert count(SOURCE) == Count(files=1, lines=13, code=5, docstrings=3)


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("async_flowrl/main.py", "async_flowrl"),
        ("async_flowrl/memory/rehearsal/model.py", "async_flowrl/memory"),
        ("separation/local.py", "separation"),
    ],
)
def test_a_room_is_a_folder_of_the_product(path: str, room: str) -> None:
    assert room_of(Path(path)) == room


def test_files_are_found_by_the_time_in_which_they_ran(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"a.py": [10.0, [100, 120]], "loop.py": [11.0, [110]]}')
    (tmp_path / "2.json").write_text('{"b.py": [10.5, [105]], "c.py": [13.0, [130]]}')
    assert visited.files_within(tmp_path, 10.4, 12.0) == {"a.py", "b.py", "loop.py"}
    assert visited.files_before(tmp_path, "loop.py") == {"a.py", "loop.py"}
