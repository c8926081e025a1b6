"""Tests of the frame's cost in a plan: CPU time of driver, reward worker and Ray on the cores that pools compute on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.plan import __main__ as plan
from async_flowrl.plan.advise import advise
from async_flowrl.plan.frame_cost import CALL_SECONDS, IDLE_SHARE, STEP_SECONDS, calls_of
from async_flowrl.plan.laws import Law
from async_flowrl.plan.limits import Limits, simulated
from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import Layout, Work
from tests.support.recorded import recorded
from tests.support.toy import toy_config, virtual

DOCS = Path(__file__).resolve().parents[3] / "docs"
ROW = re.compile(
    r"^\| (?P<load>[^|]+) \| `python -m async_flowrl\.plan (?P<options>[^`]+)` \|(?P<cells>.+)\|$", re.MULTILINE
)
"""A row of the table of docs/modes.md: a load, its command, three step times and the advice."""
ROWS = {row["load"]: row for row in ROW.finditer((DOCS / "modes.md").read_text())}
SMALL = "2 cores, small steps"


def small(*, groups: int = 2, **more: Any) -> Work:
    return Work(groups, Law(0.2 / groups), Law(0.2 / groups), **more)


def planned(work: Work, layout: Layout, *, cores: int | None = 2, backend: str = "ray") -> Prediction:
    return simulated(work, layout, Limits(2, steps=12, cores=cores, backend=backend))


def calls(work: Work) -> float:
    return STEP_SECONDS + CALL_SECONDS * calls_of(work)


def test_the_frame_takes_what_was_measured() -> None:
    """The loads of docs/benchmarks.md: CPU ms per step beside the pools, at 2 tickets twice and at 12."""
    for groups, seconds, measured in ((2, 0.219, 0.027), (2, 1.452, 0.060), (12, 2.1, 0.110)):
        assert calls(small(groups=groups)) + IDLE_SHARE * seconds == pytest.approx(measured, rel=0.03)


def test_full_cores_take_longer_by_the_frames_share_of_them() -> None:
    work, layout = small(), Layout(1, 1, max_staleness=1)
    without, with_it = (planned(work, layout, cores=cores) for cores in (None, 2))
    assert without.step_seconds == pytest.approx(0.2) and without.frame_seconds == 0
    # 2 cores compute for .4 s, and for the frame.
    assert 2 * with_it.step_seconds == pytest.approx(0.4 + with_it.frame_seconds, rel=0.01)
    assert with_it.frame_seconds == pytest.approx(calls(work) + IDLE_SHARE * with_it.step_seconds)
    assert with_it.ends[-1] / without.ends[-1] == pytest.approx(with_it.step_seconds / without.step_seconds)


def test_idle_cores_take_the_frame_for_nothing() -> None:
    for cores, update in ((4, 0.2), (2, 0.1)):
        work = Work(2, Law(0.1), Law(update / 2))
        plans = [planned(work, Layout(1, 1, max_staleness=1), cores=each) for each in (None, cores)]
        assert plans[0].step_seconds == plans[1].step_seconds


def test_on_policy_the_calls_between_two_steps_are_waited_for() -> None:
    for hand_over, seconds in (("batch", 0.4), ("stream", 0.3)):
        with_it = planned(small(), Layout(1, 1, max_staleness=0, hand_over=hand_over))
        assert with_it.step_seconds == pytest.approx(seconds + STEP_SECONDS + 3 * CALL_SECONDS)
        assert with_it.busy("rollout") == pytest.approx(0.2 / with_it.step_seconds, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "cores"),
    [
        (Layout(1, 1, max_staleness=1), 1),
        (Layout(1, 1, max_staleness=0), 1),
        (Layout(3, 1, max_staleness=1), 2),
        (Layout(1, 1, max_staleness=1, reward=1), 1),
    ],
)
def test_of_the_bound_is_what_the_pools_need_on_these_cores(layout: Layout, cores: int) -> None:
    """A bound of as many cores as workers is not the one of a step that is longer because it has fewer."""
    work = Work(6, Law(layout.rollout / 6), Law(1 / 6), score=Law(0.01))
    with_it = planned(work, layout, cores=cores)
    assert with_it.efficiency == pytest.approx(with_it.bounds.overlapped / with_it.step_seconds, rel=0.01)
    if layout.max_staleness:
        work_seconds = layout.rollout + 1.0 + with_it.frame_seconds
        assert with_it.bounds.overlapped == pytest.approx(work_seconds / cores, rel=0.01)


def test_a_reward_takes_no_longer_on_full_cores() -> None:
    work = Work(2, Law(0.1), Law(0.1), score=Law(0.05))
    without, with_it = (planned(work, Layout(1, 1, max_staleness=1), cores=cores) for cores in (None, 1))
    scored = [plan.pools["reward"]["busy"] * plan.step_seconds for plan in (without, with_it)]
    assert scored[0] == pytest.approx(0.1) and scored[1] == pytest.approx(0.1)
    assert with_it.bounds.rewards == without.bounds.rewards


def test_more_calls_cost_more() -> None:
    small_tickets = small(tickets_per_group=4)
    in_batches = small(tickets_per_group=4, tickets_per_batch=4)
    assert [calls_of(work) for work in (small(), small_tickets, in_batches)] == [6, 12, 6]
    assert calls_of(small(groups=3, tickets_per_group=3, tickets_per_batch=2)) == 5 + 6


def test_threads_of_one_process_and_gpus_have_no_frame_beside_them() -> None:
    for cores, backend in ((2, "local"), (None, "ray"), (None, "local")):
        limits = Limits(2, steps=12, cores=cores, backend=backend)
        assert simulated(small(), Layout(1, 1), limits).frame_seconds == 0
        assert not any("CPU per step" in sentence for sentence in advise(small(), limits).sentences)


def test_the_choice_of_a_mode_follows_from_the_frame() -> None:
    """Phases in turn on both cores need no time for what overlaps, but on small steps for what lies between them."""
    work = small(group_size=4)
    on_gpus, on_cores, long = (
        advise(each, Limits(2, steps=12, cores=cores)).placements.best
        for each, cores in ((work, None), (work, 2), (Work(2, Law(10.0), Law(10.0), group_size=4), 2))
    )
    assert on_gpus is not None and on_cores is not None and long is not None
    assert [plan.layout.max_staleness for plan in (on_gpus, on_cores, long)] == [0, 1, 0]


def test_the_advice_for_small_steps_is_an_order() -> None:
    advice = advise(small(), Limits(2, steps=12, cores=2))
    (said,) = [sentence for sentence in advice.sentences if sentence.startswith("At steps of")]
    assert said.startswith("At steps of 0.21 s on 2 cores use --config-name one_step_off rollout.num_workers=1 trainer")
    assert "27 ms of CPU per step" in said and "6% of the cores' time, which is in these figures" in said
    alone = advise(small(), Limits(1, steps=12, cores=1)).sentences
    assert any(sentence.startswith("At steps of 0.43 s on 1 core use --config-name sync") for sentence in alone)
    long = advise(Work(2, Law(1.5), Law(1.0)), Limits(2, steps=12, cores=2)).sentences
    assert not any("At steps of" in sentence or "runtime.backend" in sentence for sentence in long)


def test_the_command_takes_cores_and_a_backend(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--generate", "0.2", "--update", "0.2", "--prompts", "2", "--steps", "12", "--cores", "2", "--json"]
    steps = {}
    for backend in ("ray", "local"):
        assert plan.main([*given, "--backend", backend]) == 0
        steps[backend] = json.loads(capsys.readouterr().out)
    assert steps["local"]["best"]["step_seconds"] < steps["ray"]["best"]["step_seconds"]
    assert steps["local"]["shared"] == [] and len(steps["local"]["splits"]) == 1, "its process has one trainer rank"
    assert plan.main([*given, "--backend", "local", "--split", "1:2"]) == 2
    assert "runtime.backend=local has one trainer rank, got --split 1:2" in capsys.readouterr().err


@pytest.mark.parametrize("from_run", [False, True])
def test_cores_are_not_devices_where_a_split_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, from_run: bool
) -> None:
    """Every placement that is compared with 3:1 has as many devices, on the same two cores."""
    config = toy_config(1, steps=8)
    of_run = ["--from-run", str(recorded(tmp_path / "run", virtual(config), config))] if from_run else []
    numbers = ["--generate", "3", "--update", "1", "--prompts", "6"]
    given = ["--cores", "2", "--split", "3:1", "--steps", "12", "--json", *(of_run or numbers)]
    assert plan.main(given) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(each["rollout"], each["trainer"]) for each in said["splits"]] == [(3, 1)]
    assert {each["rollout"] for each in said["shared"]} == {4}


def test_a_split_of_one_process_is_kept_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--generate", "0.2", "--update", "0.2", "--prompts", "2", "--steps", "12", "--backend", "local", "--json"]
    assert plan.main([*given, "--devices", "1", "--split", "1:1"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(each["rollout"], each["trainer"]) for each in said["splits"]] == [(1, 1)] and said["shared"] == []
    assert plan.main([*given, "--devices", "1"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["splits"] == [] and alone["shared"]


def test_a_run_in_one_process_is_planned_with_one_trainer_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the run says that it was made in one process or the command line, and whatever devices the run had."""
    for name, backend, option in (("local", "local", []), ("ray", "ray", ["--backend", "local"])):
        config = toy_config(1, steps=8)
        config.runtime.backend, config.rollout.num_workers = backend, 3
        folder = recorded(tmp_path / name, virtual(config), config)
        assert plan.main(["--from-run", str(folder), "--devices", "4", "--steps", "12", "--json", *option]) == 0
        said = json.loads(capsys.readouterr().out)
        assert [(each["rollout"], each["trainer"]) for each in said["splits"]] == [(3, 1)] and said["shared"] == []


@pytest.mark.parametrize("load", [pytest.param(load, marks=() if load == SMALL else pytest.mark.slow) for load in ROWS])
def test_the_table_of_placements_says_what_the_planner_says(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[load]
    cells = [cell.strip() for cell in row["cells"].split("|")]
    assert plan.main([*row["options"].split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one_off = [p for p in found["shared"] if p["max_staleness"] == 1]
    in_turn = [p for p in found["shared"] if (p["max_staleness"], p["hand_over"]) == (0, "batch")]
    separate = [p for p in found["depths"] if p["max_staleness"] == 1]
    times = [f"{min(p['step_seconds'] for p in each):.3g}" for each in (separate, one_off, in_turn) if each]
    assert [cell.strip("*") for cell in cells[:3] if cell != "–"] == times
    best = found["best"]
    if load == SMALL:
        use = next(sentence for sentence in found["advice"] if sentence.startswith("At steps of"))
        assert best["placement"] == "separate" and "on 2 cores use --config-name one_step_off rollout" in use
        assert "**At .3 s steps on two cores use `one_step_off`" in (DOCS / "modes.md").read_text()
    advised = cells[3].replace(", on-policy", "")
    assert {"two pools": "separate", "`shared`": "shared", "`one_step_off`, two pools": "separate"}[advised] == (
        best["placement"]
    )


def test_the_table_has_a_row_for_small_steps() -> None:
    assert SMALL in ROWS and len(ROWS) == 5
