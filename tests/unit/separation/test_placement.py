"""Tests of reservations, and of the table of missing resources."""

import pytest

from separation.group import PoolSpec
from separation.resources import (
    ResourcesMissing,
    StoreTooSmall,
    check_fits,
    check_store,
    packing,
    reserve,
)


def spec(name: str, workers: int, *, gpus: float = 0.0, process_group: bool = False) -> PoolSpec:
    return PoolSpec(name, "pkg.module:factory", workers, gpus_per_worker=gpus, process_group=process_group)


def test_process_groups_come_first_and_other_workers_have_a_group_each() -> None:
    taken = reserve([spec("rollout", 2, gpus=1), spec("trainer", 2, gpus=1, process_group=True)], {"GPU": 4})
    assert [one.name for one in taken] == ["trainer", "rollout-0", "rollout-1"]
    assert taken[0].bundles == ({"CPU": 1.0, "GPU": 1},) * 2
    assert (taken[0].pool, taken[0].seats) == ("trainer", {0: 0, 1: 1})
    assert (taken[2].pool, taken[2].seats) == ("rollout", {1: 0})


@pytest.mark.parametrize(
    ("exists", "device"),
    [({"GPU": 2.0, "rollout": 2.0}, {"GPU": 1.0}), ({"rollout": 2.0}, {"rollout": 1.0}), ({"CPU": 4.0}, {})],
)
def test_devices_are_gpus_then_the_custom_resource_then_cpus(
    exists: dict[str, float], device: dict[str, float]
) -> None:
    assert reserve([spec("rollout", 1, gpus=1)], exists)[0].bundles == ({"CPU": 1.0, **device},)


def test_shortage_is_a_table_of_what_was_asked_and_what_exists() -> None:
    taken = reserve([spec("trainer", 2, gpus=1, process_group=True), spec("rollout", 4, gpus=1)], {"GPU": 4})
    with pytest.raises(ResourcesMissing) as caught:
        check_fits(taken, [{"CPU": 32, "GPU": 2}, {"CPU": 32, "GPU": 2}])
    table = [line.split() for line in str(caught.value).splitlines()]
    assert ["GPU", "6", "4", "2"] in table
    assert ["CPU", "6", "64", "0"] in table
    assert ["rollout", "4", "1", "CPU,", "1", "GPU", "4", "CPU,", "4", "GPU"] in table


def node(gpus: float) -> dict[str, float]:
    return {"CPU": 32.0, "GPU": gpus}


@pytest.mark.parametrize(
    ("free", "strategy"),
    [
        ([node(4)], "STRICT_PACK"),
        ([node(2), node(4)], "STRICT_PACK"),
        ([node(2), node(2)], "PACK"),
        ([node(3), node(3), node(3)], "PACK"),
        ([{"CPU": 1.0, "GPU": 8.0}, {"CPU": 64.0}], "PACK"),
    ],
)
def test_a_process_group_stays_on_one_node_where_one_has_enough_free(
    free: list[dict[str, float]], strategy: str
) -> None:
    (reservation,) = reserve([spec("trainer", 4, gpus=1, process_group=True)], {"GPU": 8})
    assert packing(reservation, free) == strategy


def test_a_store_that_is_too_small_is_refused() -> None:
    nodes = [{"CPU": 2.0, "object_store_memory": 3e9}, {"CPU": 2.0, "object_store_memory": 1e9}]
    check_store(4_000_000_000, nodes)
    check_store(0, [{"CPU": 2.0}])
    with pytest.raises(
        StoreTooSmall, match=r"up to 4\.5 GB of results and weights lie in the object store, which holds 4 GB"
    ):
        check_store(4_500_000_000, nodes)


def test_fractions_that_no_two_share_are_refused_though_their_sum_would_fit() -> None:
    pools = [spec("rollout", 1, gpus=1), spec("reward/judge", 3, gpus=0.6)]
    fits = reserve(pools, {"GPU": 4, "CPU": 9})
    check_fits(fits, [{"GPU": 4, "CPU": 9}])
    with pytest.raises(ResourcesMissing) as refused:
        check_fits(fits, [{"GPU": 3, "CPU": 9}])
    first, *table = str(refused.value).splitlines()
    assert first == "the cluster can't hold what was asked: it has 3 GPU and 4 are needed:"
    assert ["reward/judge", "3", "1", "CPU,", "0.6", "GPU", "3", "CPU,", "1.8", "GPU"] in [row.split() for row in table]
