"""Tests of what the planner learns from a run: toy runs in virtual time, whose durations are known."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from async_flowrl.cli.plan import main
from async_flowrl.cli.plan_from_run import Measured, bound_of, limit_of, measured, present, split_of, splits
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import Timing

GROUPS, STEPS = 4, 16


def run_of(folder: Path, timing: Timing) -> Path:
    """The directory of a toy run, in which every busy time of a worker is a span, as real workers report it."""
    config = toy_config(1, hand_over="stream", steps=STEPS)
    run = virtual(config, timing)
    began: dict[str, float] = {}
    for event in run.observer.of("state"):
        if (start := began.pop(event["worker"], None)) is not None:
            span = {"event": "span", "worker": event["worker"], "name": "work", "start": start, "end": event["time"]}
            run.observer.events.append({**span, "time": event["time"]})
        if event["state"] == "busy":
            began[event["worker"]] = event["time"]
    run.observer.events.sort(key=lambda event: event["time"])
    directory = folder / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    (directory / "events.jsonl").write_text("".join(json.dumps(e, default=str) + "\n" for e in run.observer.events))
    steps = zip(run.observer.of("step"), run.lines, strict=True)
    lines = [{"step": e["step"], "timing/step": e["ended"] - e["started"], **line} for e, line in steps]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_command_goes_by_the_seconds_that_the_workers_of_a_run_took(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, Timing(generate=1.0, update=0.25, score=0.1))
    config, took = measured(run)
    assert took.update == pytest.approx(GROUPS * 0.25, rel=0.2)
    assert took.rewards == {"reward": pytest.approx(GROUPS * 0.1, rel=0.05)}
    now = present(config, took)
    assert (now.rollout, now.trainer) == (2, 1) and limit_of(took, now) == "rollout"
    assert took.step == pytest.approx(bound_of(config, now), rel=0.1), "with constant times a step takes its formula"
    assert main(["--from-run", str(run), "--devices", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limit"] == "rollout" and len(found["splits"]) == 8
    assert found["measured"]["generation"] == pytest.approx(GROUPS, rel=0.05)
    best = min(found["splits"], key=lambda split: split["overlapped"])
    assert best["placement"] == "shared" or best["rollout"] >= 6
    assert main(["--from-run", str(run), "--split", "3:1"]) == 0
    assert main(["--from-run", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        main([])


TOOK = Measured(30.0, 10.0, {"reward": 1.0}, delivery=0.5, step=31.0, busy={})


def test_the_formulas() -> None:
    two, one = split_of(TOOK, 6, 2), split_of(TOOK, 8, 8, "shared")
    assert (two.overlapped, two.sync) == (5.0, 10.5)
    assert (one.overlapped, one.sync) == (5.0, 6.0)
    assert split_of(TOOK, 60, 20).overlapped == 1.0, "rewards are a third pool"


def test_splits_are_all_pairs_or_the_one_that_is_given_and_one_shared_pool() -> None:
    config = toy_config()
    found = splits(TOOK, config, 4, None)
    assert [(each.rollout, each.trainer) for each in found] == [(1, 3), (2, 2), (3, 1), (4, 4)]
    assert [each.placement for each in found] == ["separate"] * 3 + ["shared"]
    assert splits(TOOK, config, 4, (3, 1)) == [split_of(TOOK, 3, 1)]
    config.runtime.backend = "local"
    assert "shared" not in {each.placement for each in splits(TOOK, config, 4, None)}
