"""`make size`: what it counts as code and as docstrings."""

from benchmarks.size import Count, count

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
