"""Runs whose trainer ranks are real processes without Ray; they are forked, and cost a fraction of Ray's actors."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from async_flowrl.config.scoring_pools import TRAINER
from separation.cluster import cluster
from separation.group import PoolSpec, WorkerGroup
from tests.integration.runs import Run, train
from tests.support.process_pool import ProcessPool


@asynccontextmanager
async def forked_ranks(pools: Sequence[PoolSpec], **given: Any) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """What `separation.cluster.cluster` yields, with each trainer rank a forked process and all others threads."""
    (spec,) = (each for each in pools if each.name == TRAINER)
    others = [each for each in pools if each.name != TRAINER]
    async with cluster(others, backend="local", start_deadline=given["start_deadline"]) as groups:
        ranks = ProcessPool(spec.name, spec.num_workers, spec.factory, dict(spec.arguments))
        try:
            yield {**groups, spec.name: ranks}
        finally:
            await ranks.close()


def train_with_forked_ranks(folder: Path, mode: str, *overrides: str) -> Run:
    """A run of the real controller with several real trainer ranks on gloo.

    Its settings are those of a run on Ray, and this process must be connected to a cluster (fixture `ray_here`), which
    is asked for its room.
    """
    with mock.patch("async_flowrl.run.launch.cluster", forked_ranks):
        return train(folder, mode, "runtime.backend=ray", *overrides)
