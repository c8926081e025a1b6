"""Test of a group of workers that should share one node which others take meanwhile: it gets several nodes."""

import asyncio
from typing import Any

import pytest

from separation import ray_cluster
from separation.group import PoolSpec
from separation.placement import PACK, STRICT_PACK, reserve


@pytest.mark.parametrize(("taken_by_others", "asked"), [(False, [STRICT_PACK]), (True, [STRICT_PACK, PACK])])
def test_a_process_group_waits_for_one_node_only_so_long(
    taken_by_others: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself is not asked here: whether it can place a group is what the test decides."""
    requests: list[str] = []
    removed: list[str] = []

    async def created(group: str) -> None:
        if taken_by_others and group == STRICT_PACK:
            await asyncio.Event().wait()

    def request(bundles: Any, strategy: str) -> str:
        requests.append(strategy)
        return strategy

    monkeypatch.setattr(ray_cluster, "ONE_NODE_SECONDS", 0.05)
    monkeypatch.setattr(ray_cluster, "free_by_node", lambda: [{"CPU": 8.0, "GPU": 4.0}])
    monkeypatch.setattr(ray_cluster, "placement_group", request)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_cluster, "_created", created)
    session = object.__new__(ray_cluster.RaySession)
    session._placement_groups = []
    pool = PoolSpec("trainer", "toy", 4, gpus_per_worker=1.0, process_group=True)
    (reservation,) = reserve([pool], {"CPU": 8.0, "GPU": 8.0})
    assert asyncio.run(session._reserve(reservation)) == asked[-1]
    assert requests == asked and removed == asked[:-1] and session._placement_groups == [asked[-1]]
