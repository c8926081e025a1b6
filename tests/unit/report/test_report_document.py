"""Tests of the report's document: for runs of any length, finished or not, repeatable and of bounded size."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from async_flowrl.observability.evaluations import read_evaluations
from async_flowrl.observability.result import result_sentences
from async_flowrl.observability.run_directory import ATTEMPT
from async_flowrl.report.document import document
from async_flowrl.report.page import as_data, embedded, in_order, render
from async_flowrl.report.pictures import MAX_EVALUATIONS
from async_flowrl.report.schedule import BINS_PER_RUN, MAX_BARS, MAX_PLACES
from async_flowrl.report.series import MAX_POINTS
from tests.unit.report.written_runs import WORDS, make_run


def test_a_run_that_began_at_anothers_checkpoint_is_finished(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    later = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()[4:]]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in later))
    finish(root, 6)
    assert document([root])["runs"][0]["state"] == "finished"


def test_the_runs_of_a_sweep_have_names(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / sweep / "1") for sweep in ("fast", "slow")]
    assert [run["name"] for run in document(roots)["runs"]] == ["fast/run 1", "slow/run 1"]


@pytest.mark.parametrize(
    ("more", "highest", "said"),
    [((0.1, 0.11, 0.12), "0.2 (", "+0.11 ± 0.025."), ((-0.1, 0.3, -0.3), "0.1 (", "chance")],
)
def test_runs_are_compared_with_the_error_of_their_difference(
    tmp_path: Path, more: tuple[float, ...], highest: str, said: str
) -> None:
    roots = [make_run(tmp_path / str(rate), config=f"trainer: {{learning_rate: {rate}}}\n") for rate in (0.1, 0.2)]
    found = [json.loads(line) for line in (roots[1] / "evaluations.jsonl").read_text().splitlines()]
    scores = found[-1]["curves"]["reward"]["scores"]
    for place, by_image in scores.items():
        scores[place] = [score + more[int(place)] for score in by_image]
    (roots[1] / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    page = document(roots)
    assert [run["name"] for run in page["runs"]] == [
        "0.1 (trainer.learning_rate=0.1)",
        "0.2 (trainer.learning_rate=0.2)",
    ]
    assert f"prompts {highest}" in page["headline"] and said in page["headline"]


def finish(root: Path, steps: int, **more: Any) -> None:
    (root / "summary.json").write_text(json.dumps({"steps": steps, "total_steps": steps, "warnings": [], **more}))


def test_a_finished_run(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    finish(root, 6, evaluation_prompts="held_out", weights_digest="abc", warnings=["careful"])
    found = document([root])
    (run,) = found["runs"]
    assert run["state"] == "finished" and run["verification"]["digest"] == "abc"
    assert found["headline"].startswith("On 3 held-out prompts, the reward went from 0.1 to 0.52 in 6 steps: +0.42")
    of_the_console = result_sentences(read_evaluations(root / "evaluations.jsonl"), "held_out")
    assert [found["headline"], *run["result"]["more"]] == of_the_console
    assert run["bottleneck"].startswith("The pools take turns: the trainer waited for images 50%")
    assert [each["text"] for each in run["warnings"]] == ["careful"]
    assert run["lines"]["reward/mean"]["y"][-1] == pytest.approx(5 / 6, rel=1e-5)
    assert run["lines"]["kept:0"]["y"][0] == 0.75 and run["lines"]["kept:1"]["y"][0] == 0.0
    assert "kl" not in run["lines"], "a curve of nothing"
    assert run["x"]["training"] == {
        "step": [*range(6)],
        "images": [4, 8, 12, 16, 20, 24],
        "seconds": [2, 4, 6, 8, 10, 12],
    }
    assert run["x"]["evaluation"] == {"step": [0, 3, 6], "images": [0, 12, 24], "seconds": [0, 6, 12]}
    (bars,) = [lane["bars"] for lane in run["timeline"]["views"][0]["lanes"] if lane["place"] == "rollout-0"]
    assert bars[:2] == [[0.0, 1.0, "busy"], [1.0, 2.0, "idle"]]
    assert [prompt["text"] for prompt in run["pictures"]["prompts"]] == list(WORDS)
    assert run["pictures"]["evaluations"][1]["prompts"]["2"]["scores"]["reward"] == [
        pytest.approx(0.4),
        pytest.approx(0.42),
    ]
    assert run["pictures"]["evaluations"][1]["prompts"]["2"]["said"] == ["A", "B"]


def leave(root: Path, lock: bool, log: str) -> int:
    (root / "logs").mkdir()
    (root / "logs" / "controller.log").write_text(log)
    held = os.open(root / ".lock", os.O_CREAT | os.O_RDWR)
    if lock:
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


FAILED = """2026-01-01 INFO x: fine
2026-01-01 ERROR async_flowrl.run.job: the run failed
  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 1, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | separation.group.WorkerDied: rollout-0 died: killed
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("lock", "log", "state", "sentence"),
    [
        (True, "", "running", "Still running: 6 of 9 steps so far."),
        (False, FAILED, "failed", "Failed after 6 of 9 steps: separation.group.WorkerDied: rollout-0 died: killed"),
        (False, "", "unfinished", "Not finished: it ended after 6 of 9 steps without a word"),
        (False, f"{FAILED}2026-01-02 INFO x: {ATTEMPT}\n", "unfinished", "Not finished: it ended after 6 of 9 steps"),
    ],
)
@pytest.mark.parametrize("earlier", [3, 6])
def test_a_run_without_its_summary(
    tmp_path: Path, lock: bool, log: str, state: str, sentence: str, earlier: int
) -> None:
    root = make_run(tmp_path / "run", config="total_steps: 9\n")
    held = leave(root, lock, log)
    finish(root, earlier)  # of an earlier attempt, of fewer steps than the run has now or is to have
    with (root / "events.jsonl").open("a") as file:
        file.write('{"time": 1')
    (run,) = document([root])["runs"]
    assert run["state"] == state and run["result"]["state"].startswith(sentence)
    assert 'class="badge' not in render(document([root]))
    os.close(held)


def test_a_page_is_repeatable_makes_no_requests_and_what_files_say_is_data(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a<b>&{{script}}")
    page = render(document([root]))
    assert page == render(document([root])) and "connect-src 'none'" in page
    assert "</script><b>" not in page and "a&lt;b&gt;&amp;{{script}}" in page
    assert page.count("<script") == 3 and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    text = as_data({"a": "</script><!--\u2028"})
    assert json.loads(text) == {"a": "</script><!--\u2028"} and "<" not in text and "\u2028" not in text
    with pytest.raises(ValueError, match="JSON"):
        as_data(float("nan"))


@pytest.mark.extended
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
