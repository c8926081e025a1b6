"""Tests of the report's document: long runs, pictures, foreign text and sweeps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from async_flowrl.cli.report import main, runs_in
from async_flowrl.config import exit_codes
from async_flowrl.main import report_over
from async_flowrl.report.document import document
from async_flowrl.report.page import embedded, in_order, render, spread
from async_flowrl.report.pictures import MAX_EVALUATIONS
from async_flowrl.report.schedule import BINS_PER_RUN, MAX_BARS, MAX_PLACES
from async_flowrl.report.series import MAX_POINTS, chosen, curve
from tests.unit.report.written_runs import make_run


def test_a_long_run_stays_small_and_says_what_was_thinned(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", 800, workers=30, evaluations=60)
    found = document([root])
    (run,) = found["runs"]
    line = run["lines"]["reward/mean"]
    assert len(line["y"]) == len(line["low"]) == len(run["x"]["training"]["step"]) == MAX_POINTS
    assert (
        line["low"][0] == 0.0 and line["high"][0] == pytest.approx(1 / 800) and run["x"]["training"]["step"][-1] == 799
    )
    assert run["timeline"]["shown"] <= MAX_PLACES < run["timeline"]["workers"] == 31
    whole = run["timeline"]["views"][-1]["lanes"][0]["bins"]
    assert len(whole["busy"]) == BINS_PER_RUN and whole["busy"][7] + whole["idle"][7] == pytest.approx(1.0, abs=0.02)
    assert all(len(lane["bars"]) <= MAX_BARS for view in run["timeline"]["views"][:-1] for lane in view["lanes"])
    assert [e["version"] for e in run["pictures"]["evaluations"]][:: MAX_EVALUATIONS - 1] == [0, 800]
    notes = " ".join(found["notes"])
    assert "mean of 2 steps" in notes and "24 of 31 workers" in notes and "40 of 60 evaluations" in notes
    assert len(json.dumps(found)) < 400_000


def test_every_step_of_an_exact_window_is_named(tmp_path: Path) -> None:
    (run,) = document([make_run(tmp_path / "run", 2_100)])["runs"]
    middle = run["timeline"]["views"][0]
    inside = [step for step, start, _ in run["timeline"]["steps"] if middle["start"] <= start < middle["end"]]
    assert inside == [*range(1047, 1053)]


def test_buckets_know_gaps() -> None:
    assert curve([1.0, None, 3.0]) == {"y": [1.0, None, 3.0]}
    line = curve([1.0, 3.0, None, 5.0] + [None] * (2 * MAX_POINTS - 4))
    assert (line["y"][:3], line["low"][:3], line["high"][:3]) == ([2.0, 5.0, None], [1.0, 5.0, None], [3.0, 5.0, None])
    assert chosen([*range(10)], 4) == [0, 3, 6, 9] and chosen([1, 2], 4) == [1, 2]


def test_pictures_fill_the_page_from_the_ends_inwards(tmp_path: Path) -> None:
    found = document([make_run(tmp_path / "run", evaluations=5)])
    names = [name for name, _, _ in in_order(found)]
    assert {name.split("/")[1] for name in names[:6]} == {"step_000000", "step_000006"}
    assert all(name.endswith("_0.png") for name in names[:15]), "first images before second ones"
    inside, left_out = embedded(found, 1_000)
    assert 0 < len(inside) < len(names) == 30 and sum(map(len, inside.values())) <= 1_000
    assert left_out is not None and left_out.startswith(f"{len(inside)} of 30 images")
    assert embedded(found, 10**9)[1] is None and embedded(found, 0)[0] == {}
    assert [spread(i, 5) for i in range(5)] == [0, 2, 1, 2, 0] and spread(0, 1) == 0


def test_only_pictures_of_the_run_get_into_its_page(tmp_path: Path) -> None:
    """A run directory may come from somebody else, and its page go back there."""
    root = make_run(tmp_path / "run", evaluations=1)
    folder = root / "images" / "step_000000"
    (tmp_path / "private.png").write_bytes((folder / "000_0.png").read_bytes())
    (folder / "link.png").symlink_to(tmp_path / "private.png")
    index = json.loads((folder / "index.json").read_text())
    outside = ["../../../private.png", str(tmp_path / "private.png"), "link.png", "index.json", "gone.png"]
    index["prompts"][0] |= {"files": [*outside, "000_0.png"], "extras": {}}
    (folder / "index.json").write_text(json.dumps(index))
    inside, left_out = embedded(document([root]), 10**9)
    assert len(inside) == 5 and "0/step_000000/000_0.png" in inside
    assert left_out == "5 of 10 images are not in the run directory, or are no pictures."


def test_size_without_pictures(tmp_path: Path) -> None:
    assert len(render(document([make_run(tmp_path / "run", 2_000)]), max_mib=0)) < 500_000


def test_a_page_makes_no_requests(tmp_path: Path) -> None:
    assert "connect-src 'none'" in render(document([make_run(tmp_path / "run")]))


def test_a_sweep_with_one_run_that_was_trained_has_its_report_where_the_others_would_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "sweep" / "1")
    (tmp_path / "sweep" / "1" / "report.html").write_text("its own")
    report_over([tmp_path / "sweep" / "0", tmp_path / "sweep" / "1"], jobs=3)
    assert capsys.readouterr().out == f"report   {tmp_path / 'sweep' / 'report.html'}: 1 of 3 runs\n"
    assert (tmp_path / "sweep" / "1" / "report.html").read_text() == "its own"


def test_folders_of_a_multirun_stand_for_their_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    for name in ("10", "2", "lr=1"):
        make_run(sweep / name, config=f"total_steps: 6\nlr: {name}\n")
    assert runs_in([sweep]) == [sweep / "2", sweep / "10", sweep / "lr=1"]
    assert runs_in([sweep / "10", sweep]) == [sweep / "10", sweep / "2", sweep / "lr=1"]
    assert runs_in([tmp_path]) == [sweep / "2", sweep / "10", sweep / "lr=1"]
    assert main([str(sweep)]) == exit_codes.OK
    assert capsys.readouterr().out == f"{sweep / 'report.html'}\n"
    found = document(runs_in([sweep]))
    assert found["differences"]["rows"] == [{"key": "lr", "values": ["2", "10", "lr=1"]}]
    assert found["headline"] == (
        "3 runs, 3 unfinished. On the same evaluated prompts all that were evaluated ended at 0.52."
    )
    better = document([sweep / "2", make_run(tmp_path / "better", evaluations=4)])["headline"]
    assert "better ended highest, at 0.73 from 0.1; the other one at 0.52." in better
    (tmp_path / "other").mkdir()
    make_run(tmp_path / "other" / "2")
    assert [run["name"] for run in document([sweep / "2", tmp_path / "other" / "2"])["runs"]] == ["sweep/2", "other/2"]


def broken(root: Path) -> list[str]:
    (root / "metrics.jsonl").write_text("{}\n{\n")
    return [str(root)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (lambda root: [str(root / "nowhere")], "nowhere is no folder"),
        (lambda root: [str(root / "images")], "is no run directory and holds none"),
        (broken, "metrics.jsonl:2: not JSON"),
    ],
)
def test_what_is_no_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Callable[[Path], list[str]], sentence: str
) -> None:
    root = make_run(tmp_path / "run")
    assert main(arguments(root)) == exit_codes.CONFIG
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1
