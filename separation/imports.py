"""`without_collections` speeds up imports of large packages: it switches Python's garbage collector off meanwhile.

The collector's search for cyclic garbage takes about a fifth of the time of such imports and finds nothing.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class _Inside:
    threads: int = 0
    enabled: bool = True
    """True if the garbage collector was on before the first thread entered."""
    turn: threading.Lock = field(default_factory=threading.Lock)


_inside = _Inside()


@contextmanager
def without_collections(*, freeze: bool = False) -> Iterator[None]:
    """Switches the garbage collector of the whole process off inside the block, e.g. while torch is imported.

    If several threads are inside at once, the last one that leaves switches it on again. torch, diffusers and
    transformers create half a million objects that stay, and each full search visits all of them: the first one, right
    after the imports, takes .6 s. With `freeze`, no later search visits any object that exists when the collector is
    switched on again. That is for a process that has only imported so far, since garbage among these objects stays too.
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
                if freeze:
                    gc.freeze()
                gc.enable()
