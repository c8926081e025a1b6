"""Tests of predictions before a run's first step, from earlier steps of its directory and from the devices found."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.plan import foretell
from async_flowrl.plan.calibrate import NothingToLearn, calibrate
from async_flowrl.plan.foretell import device_memory, step_time, workers_before
from async_flowrl.plan.prediction import predicted_against_actual
from async_flowrl.plan.turns_taken import finish_times
from tests.support.recorded import recorded
from tests.support.toy import toy_config, virtual

GIB = 2**30


def write_run(folder: Path, steps: int, *, rollouts: int = 1) -> None:
    """Steps of 4 s: each ticket is generated in 3 s beside an update of 4 s."""
    folder.mkdir()
    (folder / "config.yaml").write_text("prompts_per_step: 1\ngroup_size: 4\ntotal_steps: 20\n")
    metrics = [
        {"step": s, "timing/update": 4.0, "timing/step": 4.0, "timing/wait_rollout": 0.0, "reward/mean": 0.1}
        for s in range(steps)
    ]
    events: list[dict[str, Any]] = [{"time": 0.0, "event": "worker", "worker": "rollout-9", "pid": 1}]
    events.append({"time": 0.0, "event": "rollback", "step": 0})
    names = [*(f"rollout-{n}" for n in range(rollouts)), "trainer-0"]
    events += [{"time": 0.0, "event": "worker", "worker": name, "pid": 2} for name in names]
    for s in range(steps):
        at = {"time": 4.0 * s, "event": "ticket", "kind": "train", "ordinal": s, "step": s, "worker": "rollout-0"}
        events += [at | {"state": "GENERATING"}, at | {"state": "SCORING", "time": 4.0 * s + 3.0}]
        events.append({"time": 4.0 * s + 4.0, "event": "step", "step": s, "started": 4.0 * s, "ended": 4.0 * s + 4.0})
    for name, lines in (("metrics", metrics), ("events", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def config(*overrides: str) -> Any:
    return compose_config("one_step_off", ["output_dir=unused", "total_steps=20", *overrides])


def test_the_step_time_is_that_of_earlier_steps(tmp_path: Path) -> None:
    """A toy run whose steps took as long as they did, planned as if it were to go on for ten steps more."""
    settings = toy_config(1, steps=20)
    run = virtual(settings)
    folder = recorded(tmp_path / "run", run, settings)
    names = [f"rollout-{index}" for index in range(settings.rollout.num_workers)] + ["trainer-0"]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 0, "event": "worker", "worker": n, "pid": 1}) + "\n" for n in names)
    said = step_time(replace(settings, total_steps=30), folder)
    seconds, left = re.fullmatch(
        r"(\S+) s per step, as earlier steps took, (\S+) for the 10 that are left", said
    ).groups()  # type: ignore[union-attr]
    steps = run.observer.of("step")[4:]
    took = (steps[-1]["ended"] - steps[0]["started"]) / len(steps)
    assert float(seconds) == pytest.approx(took, rel=0.1)
    minutes, rest = left.split(":")
    assert 60 * int(minutes) + int(rest) == pytest.approx(10 * took, rel=0.1, abs=1)


def test_too_few_or_other_steps_are_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2)
    assert step_time(config(), tmp_path / "run") == "no step time: too few earlier steps"
    assert workers_before(tmp_path / "run") == {"rollout": 1, "trainer": 1}, "those of the newest attempt"
    assert step_time(config("rollout.num_workers=2"), tmp_path / "run") == (
        "no step time: other workers made earlier steps"
    )


def write_shared_run(folder: Path, steps: int) -> None:
    """Steps of 7 s of one process: 4 s of training, and a ticket of 3 s for the next step, which was given before them.

    The first part of the training is 2.5 s, the second ends with an optimizer step of 0.5 s: in 0.1 s the sums of the
    ranks are added up, and in 0.4 s the weights change.
    """
    write_run(folder, steps)
    written = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    began = [event for event in written if event["event"] in ("worker", "rollback")]

    def span(worker: str, name: str, start: float, end: float, time: float, **more: Any) -> dict[str, Any]:
        return {"time": time, "event": "span", "worker": worker, "name": name, "start": start, "end": end, **more}

    events: list[dict[str, Any]] = []
    for s in range(steps):
        t = 7.0 * s
        ticket = {"event": "ticket", "kind": "train", "ordinal": s + 1, "step": s + 1, "worker": "rollout-0"}
        events += [
            ticket | {"time": t, "state": "RUNNING"},
            span("trainer-0", "forward", t, t + 2.5, t + 4.0),
            span("trainer-0", "backward", t + 2.5, t + 3.5, t + 4.0),
            span("trainer-0", "optimizer", t + 3.5, t + 3.6, t + 4.0),
            span("trainer-0", "optimizer", t + 3.6, t + 4.0, t + 4.0),
            span("rollout-0", "activate", t + 4.0, t + 4.1, t + 7.0, ordinal=s + 1),
            span("rollout-0", "generate", t + 4.1, t + 7.0, t + 7.0, ordinal=s + 1),
            ticket | {"time": t + 7.0, "state": "SCORING"},
            {"time": t + 7.0, "event": "step", "step": s, "started": t, "ended": t + 7.0},
        ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in began + events))
    with (folder / "config.yaml").open("a") as file:
        file.write("placement: shared\nmax_staleness: 1\n")


def test_processes_that_sample_and_train_are_learnt_from_by_what_ran(tmp_path: Path) -> None:
    """Neither the 7 s from a ticket's dispatch to its result, nor the 4 s of `timing/update` with what came between."""
    write_shared_run(tmp_path / "run", 20)
    learnt = calibrate(tmp_path / "run")
    assert learnt.layout.placement == "shared" and learnt.layout.devices == 1
    work = learnt.work
    assert (work.generate.mean, work.update.mean, work.finish.mean) == pytest.approx((3.0, 3.5, 0.5))
    said = step_time(config("placement=shared", "total_steps=30"), tmp_path / "run")
    assert said == "7 s per step, as earlier steps took, 1:10 for the 10 that are left"
    compared = predicted_against_actual(tmp_path / "run")
    assert compared is not None
    assert compared["deviation"] == pytest.approx(0.0, abs=0.02)
    assert compared["predicted"]["rollout"] == pytest.approx(3 / 7, rel=0.03)


def test_the_end_of_an_update_is_that_of_the_rank_that_waited_least() -> None:
    """In each of three steps; who is early waits for the others when the sums are added up."""

    def spans(rank: str, step: int, *seconds: float) -> list[dict[str, Any]]:
        return [
            {"event": "span", "worker": rank, "name": "optimizer", "start": step, "end": step + each}
            for each in seconds
        ]

    history = [
        event
        for step, waited in ((0, 2.0), (1, 3.0), (2, 0.0))
        for event in (
            *spans("trainer-0", step, waited + 0.25, 0.5),
            *spans("trainer-1", step, 1.0 + 0.25, 0.5),
            {"event": "span", "worker": "trainer-0", "name": "forward", "start": step, "end": step + 9.0},
            {"event": "step", "step": step},
        )
    ]
    assert finish_times(history) == [1.75, 1.75, 0.75]


def test_a_resume_with_another_placement_reads_the_earlier_steps_as_they_were_made(tmp_path: Path) -> None:
    """config.yaml has the new placement by then; two pools of these durations take 4 s."""
    write_shared_run(tmp_path / "run", 20)
    inputs = json.dumps({"time": 0.0, "event": "inputs", "placement": "shared"})
    with (tmp_path / "run/events.jsonl").open("a") as file:
        file.write(f"{inputs}\n")
    written = tmp_path / "run/config.yaml"
    written.write_text(written.read_text().replace("placement: shared", "placement: separate"))
    learnt = calibrate(tmp_path / "run")
    assert learnt.layout.placement == "shared"
    assert (learnt.work.generate.mean, learnt.work.update.mean) == pytest.approx((3.0, 3.5))
    said = step_time(config("placement=separate", "total_steps=30"), tmp_path / "run")
    assert re.match(r"4\S* s per step, from what earlier steps did with shared pools, ", said)


def test_a_run_without_a_span_of_training_teaches_nothing(tmp_path: Path) -> None:
    write_shared_run(tmp_path / "run", 20)
    lines = (tmp_path / "run/events.jsonl").read_text().splitlines()
    (tmp_path / "run/events.jsonl").write_text("".join(f"{x}\n" for x in lines if "ward" not in x))
    with pytest.raises(NothingToLearn, match="no span of training"):
        calibrate(tmp_path / "run")


def test_whatever_goes_wrong_is_said_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "run", 2)
    (tmp_path / "run/events.jsonl").write_text("{\n")
    assert step_time(config(), tmp_path / "run") == "no step time: the planner failed"

    def broken(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(foretell, "plan_memory", broken)
    assert device_memory(config(), {"rollout": GIB}) == "no memory: the planner failed"
    assert device_memory(config(), {"reward": GIB}) == "no memory: only rewards have GPUs"


def test_the_memory_of_devices_that_were_found() -> None:
    said = device_memory(config(), {"rollout": 24 * GIB, "trainer": 24 * GIB})
    assert said.startswith("memory: trainer rank 1.") and said.count(" of 24 GiB") == 2
    assert device_memory(config("model.path=/nowhere"), {"rollout": GIB}) == "no memory: model cannot be planned"
