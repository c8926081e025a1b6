"""Tests of the report's document: long runs, pictures, foreign text and sweeps."""

import json
from pathlib import Path

import pytest
from PIL import Image

from async_flowrl.report.document import document
from async_flowrl.report.page import embedded, in_order, render
from async_flowrl.report.pictures import MAX_EVALUATIONS
from async_flowrl.report.schedule import BINS_PER_RUN, MAX_BARS, MAX_PLACES
from async_flowrl.report.series import MAX_POINTS
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


def test_pictures_fill_the_page_from_the_ends_inwards(tmp_path: Path) -> None:
    found = document([make_run(tmp_path / "run", evaluations=5)])
    names = [name for name, _, _ in in_order(found)]
    assert {name.split("/")[1] for name in names[:6]} == {"step_000000", "step_000006"}
    assert all(name.endswith("_0.png") for name in names[:15]), "first images before second ones"
    inside, left_out = embedded(found, 1_000)
    assert 0 < len(inside) < len(names) == 30 and sum(map(len, inside.values())) <= 1_000
    assert left_out is not None and left_out.startswith(f"{len(inside)} of 30 images")
    assert embedded(found, 10**9)[1] is None and embedded(found, 0)[0] == {}


def test_sources_are_in_the_page_once_and_first(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", evaluations=2)
    (root / "images" / "sources").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(root / "images" / "sources" / f"{name}.webp")
    for index in (root / "images").glob("*/index.json"):
        entries = json.loads(index.read_text())
        entries["prompts"][0]["sources"] = entries["prompts"][2]["sources"] = ["sources/a.webp", "sources/b.webp"]
        index.write_text(json.dumps(entries))
    found = document([root])
    sources = [prompt["sources"] for prompt in found["runs"][0]["pictures"]["prompts"]]
    assert sources == [["sources/a.webp", "sources/b.webp"], [], ["sources/a.webp", "sources/b.webp"]]
    inside, left_out = embedded(found, 10**9)
    assert list(inside)[:2] == ["0/sources/a.webp", "0/sources/b.webp"] and len(inside) == 2 + 12
    assert left_out is None


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
    assert left_out is not None and left_out.startswith("5 of 10 images")


def test_a_page_makes_no_requests(tmp_path: Path) -> None:
    assert "connect-src 'none'" in render(document([make_run(tmp_path / "run")]))
