"""Tests of reservations, and of the table of missing resources."""

from pathlib import Path

import pytest

from separation.group import PoolSpec
from separation.node import OtherCode, code_of, compare_code, sees
from separation.resources import (
    Reservation,
    ResourcesMissing,
    StoreTooSmall,
    check_fits,
    check_store,
    packing,
    reserve,
    share_of_node,
    totals,
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


A, B = {"node:10.0.0.1": 1.0}, {"node:10.0.0.2": 1.0}
EIGHT = {"CPU": 64.0, "GPU": 8.0}


def plan(*pools: PoolSpec, nodes: list[dict[str, float]]) -> list[Reservation]:
    return reserve(pools, totals(nodes))


def trainer(workers: int, each: int, gpus: float = 1.0) -> PoolSpec:
    return PoolSpec("trainer", "toy", workers, gpus_per_worker=gpus, process_group=True, workers_per_node=each)


def test_neighbours_share_a_node_and_every_node_is_another() -> None:
    (reservation,) = plan(trainer(16, 8), nodes=[EIGHT | A, EIGHT | B])
    assert reservation.apart and reservation.bundles == ({"CPU": 8.0, "GPU": 8.0},) * 2
    assert [*reservation.seats.values()] == [0] * 8 + [1] * 8
    assert reservation.share == {"CPU": 1.0, "GPU": 1.0}


def test_of_shared_devices_a_node_gives_whole_ones() -> None:
    assert share_of_node({"CPU": 1.0, "GPU": 0.5}, 3) == {"CPU": 3.0, "GPU": 2.0}
    assert share_of_node({"GPU": 0.25}, 2) == {"GPU": 0.5}


def test_what_fits_is_not_refused() -> None:
    nodes = [EIGHT | A, EIGHT | B]
    check_fits(plan(trainer(8, 4), PoolSpec("rollout", "toy", 8, gpus_per_worker=1.0), nodes=nodes), nodes)


def test_code_is_compared_by_what_is_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "notes.txt"):
        (package / name).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_of(["some_package", "no_such_package"])
    (package / "notes.txt").write_text("other")
    assert code_of(["some_package", "no_such_package"]) == before
    compare_code(before, before, node="10.0.0.2", worker="rollout-0")
    (package / "inner" / "__init__.py").write_text("x = 1\n")
    after = code_of(["some_package"])
    with pytest.raises(OtherCode, match=r"node 10\.0\.0\.2 has another version of some_package .*asked by rollout-0"):
        compare_code(after, before, node="10.0.0.2", worker="rollout-0")
    with pytest.raises(OtherCode, match=r"some_package was edited while the run goes on .*so rollout-0\.1 on node"):
        compare_code(before, after, node="10.0.0.2", worker="rollout-0.1")


def test_a_file_is_seen_only_with_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("separation.node.SIGHT_SECONDS", 0.0)
    path = tmp_path / "mark"
    assert not sees(str(path), "text")
    path.write_text("text")
    assert sees(str(path), "text") and not sees(str(path), "another")
