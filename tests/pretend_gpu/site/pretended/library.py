"""Typed C functions of the pretended device's library, which is loaded before torch and loads torch's libraries."""

import ctypes
import functools
import os
from pathlib import Path

LIBRARY = "pretend_cuda.so"
_FUNCTIONS = {
    "device_count": ((), ctypes.c_int),
    "operators": ((), ctypes.c_char_p),
    "nondeterministic": ((), ctypes.c_char_p),
    "forget_operators": ((), None),
    "varies": ((ctypes.c_char_p, ctypes.c_char_p), None),
    "live_bytes": ((ctypes.c_int,), ctypes.c_ulong),
    "peak_bytes": ((ctypes.c_int,), ctypes.c_ulong),
    "reset_peak": ((ctypes.c_int,), None),
    "resize": ((ctypes.c_void_p, ctypes.c_int, ctypes.c_ulong), None),
    "touch": ((ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_int), None),
    "begin": ((ctypes.c_int, ctypes.c_long), ctypes.c_void_p),
    "end": ((ctypes.c_void_p,), None),
    "ended": ((ctypes.c_int, ctypes.c_long), None),
}
Told = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
"""A function that the device calls with what happened ("race", "sync", ...) and a text."""


@functools.cache
def load() -> ctypes.CDLL:
    """The library in the folder PRETEND_LIBRARIES. Raises RuntimeError where it was not built."""
    folder = os.environ.get("PRETEND_LIBRARIES", "")
    path = Path(folder) / LIBRARY
    if not folder or not path.exists():
        raise RuntimeError(
            f"PRETEND_CUDA_DEVICES is set but PRETEND_LIBRARIES={folder!r} has no {LIBRARY}: start the program with "
            "`python -m tests.pretend_gpu.launch ...`, which builds it"
        )
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(library, f"pretend_{name}")
        function.argtypes, function.restype = arguments, result
    library.pretend_tell.argtypes = (Told,)
    return library


def call(name: str, *arguments: object) -> object:
    """The function pretend_`name`; text as str."""
    result = getattr(load(), f"pretend_{name}")(*arguments)
    return result.decode() if isinstance(result, bytes) else result
