"""A context manager that makes a logger quieter for a while."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quieter(name: str, level: int) -> Iterator[None]:
    """Sets the level of the logger `name` inside the `with` block; loggers below it that have no level follow it."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
