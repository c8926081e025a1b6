"""Tests of workers per node: reservations, refusals with a table, and comparisons between nodes."""

from pathlib import Path

import pytest

from separation.group import PoolSpec
from separation.node import OtherCode, code_of, compare_code, sees
from separation.placement import (
    Reservation,
    ResourcesMissing,
    address_of,
    check_fits,
    reserve,
    seating,
    share_of_node,
    totals,
)

A, B, C = ({"node:10.0.0.1": 1.0}, {"node:10.0.0.2": 1.0}, {"node:10.0.0.3": 1.0})
EIGHT = {"CPU": 64.0, "GPU": 8.0}


def plan(*pools: PoolSpec, nodes: list[dict[str, float]]) -> list[Reservation]:
    return reserve(pools, totals(nodes))


def trainer(workers: int, each: int, gpus: float = 1.0) -> PoolSpec:
    return PoolSpec("trainer", "toy", workers, gpus_per_worker=gpus, process_group=True, workers_per_node=each)


def test_neighbours_share_a_node_and_every_node_is_another() -> None:
    (reservation,) = plan(trainer(16, 8), nodes=[EIGHT | A, EIGHT | B])
    assert reservation.apart and reservation.bundles == ({"CPU": 8.0, "GPU": 8.0},) * 2
    assert [seat.bundle for seat in reservation.seats] == [0] * 8 + [1] * 8
    assert all(seat.share == {"CPU": 1.0, "GPU": 1.0} for seat in reservation.seats)


def test_of_shared_devices_a_node_gives_whole_ones() -> None:
    assert share_of_node({"CPU": 1.0, "GPU": 0.5}, 3) == {"CPU": 3.0, "GPU": 2.0}
    assert share_of_node({"GPU": 0.25}, 2) == {"GPU": 0.5}


def test_too_few_nodes_with_so_much_are_refused_with_who_would_sit_where() -> None:
    nodes = [EIGHT | A, EIGHT | B, {"CPU": 64.0, "GPU": 2.0} | C]
    asked = plan(trainer(12, 4), PoolSpec("rollout", "toy", 2, gpus_per_worker=1.0), nodes=nodes)
    with pytest.raises(ResourcesMissing) as refused:
        check_fits(asked, nodes)
    text = str(refused.value)
    assert text.startswith("4 trainer workers per node need 3 nodes with 4 CPU, 4 GPU, and 2 have that:")
    assert "10.0.0.1  64 CPU, 8 GPU  trainer-0, trainer-1, trainer-2, trainer-3, rollout-0, rollout-1" in text
    assert "nowhere                  trainer-8, trainer-9, trainer-10, trainer-11" in text


def test_what_fits_is_not_refused() -> None:
    nodes = [EIGHT | A, EIGHT | B]
    check_fits(plan(trainer(8, 4), PoolSpec("rollout", "toy", 8, gpus_per_worker=1.0), nodes=nodes), nodes)


def test_a_table_says_nowhere_only_of_what_has_no_room() -> None:
    table = seating(plan(trainer(2, 1), nodes=[{"GPU": 2.0}]), [{"GPU": 2.0, "CPU": 9.0}, {"GPU": 2.0, "CPU": 9.0} | B])
    assert "nowhere" not in table and table.splitlines()[1].startswith("?") and "10.0.0.2" in table
    assert address_of({"node:__internal_head__": 1.0} | A) == "10.0.0.1"


def test_workers_per_node_must_divide_the_workers() -> None:
    with pytest.raises(ValueError, match="workers_per_node=3 of the pool trainer must divide its 4 workers"):
        trainer(4, 3)


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
