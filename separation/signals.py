"""Context managers for SIGINT and SIGTERM of this process while a cluster starts or ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ignores SIGINT inside the block, if this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


@contextmanager
def sigterm_ours_alone() -> Iterator[None]:
    """Context in which started processes inherit a blocked SIGTERM; it also keeps this process's own SIGTERM handler.

    `ray.init` replaces the handler. Slurm, `timeout` and shells send SIGTERM to every process of a job. This process
    then ends in order, with a checkpoint, and needs its workers for that; they are ended by SIGKILL when it is done.
    Daemons and the workers that they start inherit the mask of blocked signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
