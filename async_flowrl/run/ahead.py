"""`cluster_ahead` starts a run's own Ray cluster beside the imports of the run's code, which saves a second.

async_flowrl/main.py calls it, before anything has imported torch: this module must not import it either.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.observability.terminal import say
from async_flowrl.run.pools import outline
from separation.early_cluster import EarlyCluster
from separation.imports import without_collections
from separation.placement import ResourcesMissing, check_fits, own_cluster, reserve


@contextmanager
def cluster_ahead(config: Config, *, meanwhile: Callable[[], object]) -> Iterator[EarlyCluster | None]:
    """Starts the cluster of a run that needs one of its own and yields it; it is ended if no run has taken it over.

    Yields None for any other run. `meanwhile` is called in a thread while the cluster gets ready; what it raises is
    raised here. Raises ConfigError, before anything is started, if this machine cannot hold the pools, and SystemExit
    on SIGTERM (`sigterm_ends`).
    """
    if not needs_own_cluster(config):
        yield None
        return
    check_fits_here(config)
    with sigterm_ends():
        early = EarlyCluster(outline(config), meanwhile=meanwhile)
        try:
            yield early
        finally:
            early.close()


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """Context in which SIGTERM raises SystemExit in the main thread, with the exit code RESUMABLE.

    So what was started is ended, and whoever started the run may start it again. While a run listens to SIGTERM itself
    (stopping.py), that has precedence. Does nothing in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> NoReturn:
        say("async_flowrl: ended by SIGTERM before the first step\n", sys.stderr)
        raise SystemExit(exit_codes.RESUMABLE)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def needs_own_cluster(config: Config) -> bool:
    """Returns whether the run trains on a Ray cluster that it starts itself, without looking at the machines before."""
    runtime = config.runtime
    return runtime.backend == "ray" and runtime.address is None and not config.dry_run and not config.preflight


def check_fits_here(config: Config) -> None:
    """Raises ConfigError, with a table, if this machine's cores or GPUs cannot hold the pools; starts nothing."""
    with without_collections():
        from separation.ray_connection import gpus_here
    wanted = outline(config)
    try:
        cpus, custom = own_cluster(wanted, os.cpu_count() or 1)
        here = {"CPU": float(cpus), "GPU": gpus_here(), **custom}
        check_fits(reserve(wanted, here), [here])
    except ResourcesMissing as error:
        raise ConfigError(str(error)) from error
