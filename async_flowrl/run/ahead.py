"""`cluster_ahead` starts a run's own Ray cluster beside the imports of the run's code, which saves a second.

async_flowrl/main.py calls it, before anything has imported torch: this module must not import it either.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.run.pools import outline
from separation.early_cluster import EarlyCluster
from separation.imports import without_collections
from separation.placement import ResourcesMissing, check_fits, own_cluster, reserve


@contextmanager
def cluster_ahead(config: Config, *, meanwhile: Callable[[], object]) -> Iterator[EarlyCluster | None]:
    """Starts the cluster of a run that needs one of its own and yields it; it is ended if no run has taken it over.

    Yields None for any other run. `meanwhile` is called in a thread while the cluster gets ready, and must not raise.
    Raises ConfigError, before anything is started, if this machine cannot hold the pools.
    """
    if not needs_own_cluster(config):
        yield None
        return
    check_fits_here(config)
    early = EarlyCluster(outline(config), meanwhile=meanwhile)
    try:
        yield early
    finally:
        early.close()


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
