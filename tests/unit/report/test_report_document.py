"""Tests of the report's document: for runs of any length, finished or not, repeatable and of bounded size."""

import fcntl
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.config import exit_codes
from async_flowrl.main import report_over
from async_flowrl.observability.evaluations import Curve, Evaluation, read_evaluations
from async_flowrl.observability.images import write_images
from async_flowrl.observability.result import result_sentences
from async_flowrl.observability.run_directory import ATTEMPT
from async_flowrl.report.command import main
from async_flowrl.report.document import document
from async_flowrl.report.folders import runs_in
from async_flowrl.report.page import as_data, embedded, in_order, render, spread
from async_flowrl.report.pictures import MAX_EVALUATIONS, folder_of
from async_flowrl.report.records import read_run
from async_flowrl.report.schedule import BINS_PER_RUN, MAX_BARS, MAX_PLACES
from async_flowrl.report.thin import MAX_POINTS, Buckets, chosen

WORDS = ("a cat", "</script><b>", "\u202eقط")


def lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(version: int, rise: float) -> Evaluation:
    """Scores of three prompts, two images each, that rise alike."""
    scores = {place: (0.1 * place + rise, 0.1 * place + 1.1 * rise) for place in range(3)}
    return Evaluation(version, False, "s", 4, 1.0, {"reward": Curve("trained", 1.0, "t", scores)})


def make_run(root: Path, steps: int = 6, *, workers: int = 1, evaluations: int = 3, config: str = "") -> Path:
    """A run directory as the program writes it: each step a second of rollout, then one of training."""
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(config or f"name: x\ntotal_steps: {steps}\nplacement: separate\ngroup_size: 4\n")
    lines(
        root / "metrics.jsonl",
        [
            {"step": s, "reward/mean": s / steps, "images": 4, "kept/0": 3, "kept_of/0": 4, "kept_of/1": 4, "kl": None}
            for s in range(steps)
        ],
    )
    events: list[dict[str, Any]] = []
    for s in range(steps):
        t = 100.0 + 2 * s
        for w in range(workers):
            events.append({"time": t, "event": "state", "worker": f"rollout-{w}", "state": "busy"})
            span = {"event": "span", "worker": f"rollout-{w}", "name": "generate", "start": t, "end": t + 1}
            events.append({"time": t + 1, **span})
            events.append({"time": t + 1, "event": "state", "worker": f"rollout-{w}", "state": "idle"})
        events.append({"time": t, "event": "state", "worker": "trainer-0", "state": "wait_data"})
        span = {"event": "span", "worker": "trainer-0", "name": "forward", "start": t + 1, "end": t + 2}
        events.append({"time": t + 2, **span})
        ticket = {"event": "ticket", "kind": "train", "ordinal": s, "step": s, "group": 0}
        events += [{"time": t + 1, **ticket, "state": state} for state in ("SCORING", "READY")]
        events.append({"time": t + 2, **ticket, "state": "TRAINED"})
        events.append({"time": t + 2, "event": "step", "step": s, "started": t, "ended": t + 2})
    lines(root / "events.jsonl", events)
    found = [evaluation(round(i * steps / max(1, evaluations - 1)), 0.2 * i) for i in range(evaluations)]
    lines(root / "evaluations.jsonl", [each.to_json() for each in found])
    for each in found:
        images = {place: np.full((2, 16, 16, 3), 20 * place, dtype=np.uint8) for place in range(3)}
        details = [{"prompt": text, "extras": {"ocr": {"read": ("A", "B")}}} for text in WORDS]
        write_images(root / "images" / folder_of(each), images, details, most=4, side=64)
    return root


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
    assert [pair["text"] for pair in run["pairs"]] == list(WORDS) and run["pairs"][0]["after"] == 6
    assert run["pictures"]["evaluations"][1]["prompts"]["2"]["scores"]["reward"] == [
        pytest.approx(0.4),
        pytest.approx(0.42),
    ]
    assert run["pictures"]["evaluations"][1]["prompts"]["2"]["said"] == ["read: A", "read: B"]


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    assert render(document([root])) == render(document([root]))


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


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    found = document([tmp_path])
    assert found["headline"] == "No step has been trained yet."
    assert found["runs"][0]["bottleneck"] == "Too little was recorded to name a bottleneck."
    assert found["runs"][0]["timeline"] is None
    render(found)


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
    assert Buckets(3).line([1.0, None, 3.0]) == {"y": [1.0, None, 3.0]}
    line = Buckets(2 * MAX_POINTS).line([1.0, 3.0, None, 5.0] + [None] * (2 * MAX_POINTS - 4))
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


def test_how_to_go_on_is_the_whole_command(tmp_path: Path) -> None:
    root = make_run(tmp_path / "my run", config="total_steps: 9\n")
    (root / ".hydra").mkdir()
    (root / ".hydra" / "hydra.yaml").write_text("hydra:\n  job:\n    config_name: one_step_off\n")
    (root / ".hydra" / "overrides.yaml").write_text("- seed=2\n- output_dir=before/${name}\n- resume=never\n")
    (run,) = document([root])["runs"]
    assert run["verification"]["typed"] == (
        "async-flowrl train --config-name one_step_off seed=2 'output_dir=before/${name}' resume=never"
    )
    ((_, command),) = run["verification"]["commands"]
    assert shlex.split(command)[4:] == ["seed=2", f"output_dir='{root}'", "resume=auto"]


def test_what_files_say_is_data(tmp_path: Path) -> None:
    root = make_run(tmp_path / "a<b>&{{script}}")
    page = render(document([root]))
    assert "</script><b>" not in page and "a&lt;b&gt;&amp;{{script}}" in page
    assert page.count("<script") == 3 and "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    text = as_data({"a": "</script><!--\u2028"})
    assert json.loads(text) == {"a": "</script><!--\u2028"} and "<" not in text and "\u2028" not in text
    with pytest.raises(ValueError, match="JSON"):
        as_data(float("nan"))


def test_size_without_pictures(tmp_path: Path) -> None:
    assert len(render(document([make_run(tmp_path / "run", 2_000)]), max_mib=0)) < 500_000


def test_a_live_page_names_its_pictures_and_may_ask_its_own_origin_alone(tmp_path: Path) -> None:
    page = render(document([make_run(tmp_path / "run")]), live=True)
    assert "data:image" not in page and "connect-src 'self'" in page and 'data-live="true"' in page
    assert "connect-src 'none'" in render(document([tmp_path / "run"]))


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


def test_pools_of_a_shared_run_have_what_their_devices_computed(tmp_path: Path) -> None:
    """In every step rollout computes for a second, then trainer for another: neither waits while the other computes."""
    root = make_run(tmp_path / "run", config="name: x\ntotal_steps: 6\nplacement: shared\ngroup_size: 4\n")
    sync = {"publishes": 7, "bytes": 7 * 2**20, "transport": "object_store"}
    devices = {"sampled": 0.5, "trained": 0.25, "rewards": 0.05, "barrier": 0.125, "idle": 0.25}
    summary = {"sync": sync, "efficiency": 0.9, "devices": devices, "swaps": 3}
    (root / "summary.json").write_text(json.dumps(summary))
    made = document([root])["runs"][0]
    shares = {each["pool"]: each["shares"]["busy"] for each in made["pools"]}
    assert shares == {"rollout": pytest.approx(0.5), "trainer": pytest.approx(0.5)}
    waits = [each["shares"][state] for each in made["pools"] for state in ("idle", "wait_data", "wait_weights")]
    assert max(waits) == 0.0
    facts = dict(made["facts"])
    assert facts["Placement"] == "shared: each process samples and trains"
    assert facts["Versions"] == "7 of 1.0 MiB, which every process made itself" and "Weights sent" not in facts
    assert facts["Efficiency in the steady state: sampling and training ÷ measured"] == "90%"
    assert made["shared"]
    assert facts["Time of the devices"] == (
        "sampled 50%, trained 25%, idle 25% (while a reward was made 5%, while another device computed 12%)"
    )
    assert facts["Swaps of the sampled weights"] == "3"


def test_the_tickets_are_read_where_they_say_for_how_long_rewards_are_made(tmp_path: Path) -> None:
    """The verdict on shared processes needs some; other reports leave out the largest part of the file."""
    for placement, read in (("shared", {"SCORING", "READY"}), ("separate", set())):
        root = make_run(tmp_path / placement, config=f"name: x\ntotal_steps: 6\nplacement: {placement}\n")
        assert {event["state"] for event in read_run(root).history if event["event"] == "ticket"} == read
