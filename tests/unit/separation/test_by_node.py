"""Tests of workers per node: reservations, refusals with a table, and comparisons between nodes."""

from pathlib import Path

import pytest

from separation.group import PoolSpec
from separation.node import OtherCode, code_of, compare_code, sees
from separation.resources import (
    Reservation,
    check_fits,
    reserve,
    share_of_node,
    totals,
)

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
