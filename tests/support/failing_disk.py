"""`failing_disk` makes writes fail: a call of fsync or rename reports a full disk, or stands for a process's end."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class Torn(BaseException):
    """Stands for the end of the process that was writing."""


@contextmanager
def failing_disk(spoil: str | None, *, at: int) -> Iterator[None]:
    """Makes the `at`-th fsync or rename in the block raise Torn (`spoil` is "torn") or report a full disk ("full").

    None changes nothing. With "torn", the end of the block raises Torn if no call has.
    """
    if spoil is None:
        yield
        return
    left = at

    def spoilt(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise Torn if spoil == "torn" else OSError(errno.ENOSPC, "No space left on device")
            return function(*args, **kwargs)

        return wrapper

    with ExitStack() as patches:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
            patches.enter_context(mock.patch.object(owner, name, spoilt(getattr(owner, name))))
        yield
    if spoil == "torn":
        raise Torn
