"""Logs that are of no use for a while."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quieter(name: str, level: int) -> Iterator[None]:
    """Inside, the logger of that name, and those below it, log what is of `level` or above."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
