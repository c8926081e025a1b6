"""`keep_freed_memory` makes glibc's malloc keep the memory that is freed for the next allocations of this process.

On a CPU, torch frees the activations of every pass. By default glibc returns most of them to the kernel, and the next
pass has their pages mapped and zeroed again: thousands of page faults per step.
"""

import ctypes
import logging
import os
from collections.abc import Mapping

logger = logging.getLogger(__name__)

LARGEST_KEPT_BYTES = 32 * 2**20
"""Largest block, in bytes, that is kept. Larger ones are mapped for themselves and returned as soon as they are freed.
It is the most that every version of glibc takes, and the most that glibc's own adjustment comes to."""
PARAMETERS = {
    "M_MMAP_THRESHOLD": (-3, LARGEST_KEPT_BYTES),
    "M_TRIM_THRESHOLD": (-1, 2**30),
    "M_TOP_PAD": (-2, 64 * 2**20),
}
"""Parameters of mallopt(3), with their numbers in malloc.h and the bytes that they are set to: the threshold of
LARGEST_KEPT_BYTES, what the first thread's arena keeps at its end, and what the arenas of other threads keep, which is
all of it from 64 MiB on, the size of their heaps. Setting one of them also ends glibc's own adjustment of the first
two."""
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
TUNABLES = "GLIBC_TUNABLES"
"""Environment variables from which glibc reads the same parameters when a process starts."""


def keep_freed_memory() -> bool:
    """Sets malloc's parameters, for all threads of this process, and returns True. Results do not change.

    Returns False and changes nothing where the C library is not glibc, and if the environment sets parameters of
    malloc itself (VARIABLES, or `glibc.malloc` in TUNABLES). If malloc refuses one of the parameters it sets the
    others, warns, and returns False. It may be called repeatedly.
    """
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names or set_by_environment(os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    refused = [name for name, (number, value) in PARAMETERS.items() if mallopt(number, value) != 1]
    if refused:
        logger.warning("malloc has refused %s of this project (separation/malloc.py)", ", ".join(refused))
    return not refused


def set_by_environment(environment: Mapping[str, str]) -> bool:
    """Returns True if the environment sets one of malloc's parameters."""
    return "glibc.malloc." in environment.get(TUNABLES, "") or any(name in environment for name in VARIABLES)
