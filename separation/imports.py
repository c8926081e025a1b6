"""Imports at what they cost: Python's search for cyclic garbage beside them finds nothing, for a fifth of the time."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class _Inside:
    threads: int = 0
    enabled: bool = True
    """Whether garbage was collected before the first of them."""
    turn: threading.Lock = field(default_factory=threading.Lock)


_inside = _Inside()


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, cyclic garbage of the whole process waits; in several threads at once, for the end of the last.

    torch, diffusers and transformers make half a million objects that stay; each full search goes over all of them.
    """
    with _inside.turn:
        if _inside.threads == 0:
            _inside.enabled = gc.isenabled()
            gc.disable()
        _inside.threads += 1
    try:
        yield
    finally:
        with _inside.turn:
            _inside.threads -= 1
            if _inside.threads == 0 and _inside.enabled:
                gc.enable()
