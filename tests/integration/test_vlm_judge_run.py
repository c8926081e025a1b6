"""Tests of runs with a judge at a server that answers wrongly, dies, or scores differently after a resume."""

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.integration.forked_run import ForkedRun
from tests.integration.runs import Run, lines, train, wait_until
from tests.support.scripted_judge import Request, ScriptedJudge, completion, scripted_judge

STEPS = 3
EVALUATION = 4
"""Images of the evaluation at the end."""


def redness(request: Request) -> float:
    url = request["messages"][-1]["content"][0]["image_url"]["url"]
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))))
    return float(image[..., 0].mean() / 255)


def honest(request: Request) -> bytes:
    return completion(json.dumps({"score": redness(request)}))


def changed(request: Request) -> bytes:
    return completion(json.dumps({"score": 1 - redness(request)}))


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    with scripted_judge(honest) as judge:
        yield judge


def judged(server: ScriptedJudge, **options: Any) -> list[str]:
    """Overrides of a run that is trained by this judge alone."""
    given = {"base_url": server.url, "model": "tiny", "range": [0, 1], **options}
    term = "{name: vlm_judge, options: {" + ", ".join(f"{key}: {json.dumps(v)}" for key, v in given.items()) + "}}"
    return ["~reward.terms.color", "+reward.terms={judge: " + term + "}", f"total_steps={STEPS}", "reward.backoff=0"]


@pytest.mark.slow
@pytest.mark.serial("runs")
def test_a_resume_is_bitwise_the_same_though_the_judge_has_changed_its_mind(
    server: ScriptedJudge, tmp_path: Path
) -> None:
    """Killed once everything is scored and checkpoint 1 is there; scores.jsonl and the cache each suffice."""
    overrides = [*judged(server), "save.every=1"]
    whole = train(tmp_path / "whole", "sync", *overrides)
    assert len(server.requests) == STEPS * 2 * 4 + EVALUATION
    killed = tmp_path / "killed"
    slow = ["disturb.update=2", "disturb.constant=true"]
    process = ForkedRun(killed, "sync", *overrides, *slow)
    wait_until(process, lambda: len(lines(killed / "scores.jsonl")) == STEPS * 2, "all groups are scored")
    process.kill()
    for checkpoint in (killed / "checkpoints").glob("step_[2-9]"):
        shutil.rmtree(checkpoint)
    assert Run(killed).metrics[-1]["step"] < STEPS, "it was not killed in time"
    asked, server.behaviour = len(server.requests), changed
    assert resumed(killed, tmp_path / "scores", overrides, without=["judge_cache"]).digest == whole.digest
    cached = resumed(killed, tmp_path / "cache", overrides, without=["scores.jsonl"])
    assert cached.digest == whole.digest
    assert cached.metrics[-1]["reward/judge/cached"] == 1.0
    assert len(server.requests) == asked + 2 * EVALUATION
    neither = resumed(killed, tmp_path / "neither", overrides, without=["scores.jsonl", "judge_cache"])
    assert neither.digest != whole.digest


def resumed(killed: Path, folder: Path, overrides: list[str], *, without: list[str]) -> Run:
    """A copy of the killed run, without some of its files, run to its end."""
    shutil.copytree(killed, folder, ignore=shutil.ignore_patterns(*without))
    return train(folder, "sync", *overrides, "resume=auto")


@pytest.mark.extended
def test_a_judge_that_lies_about_one_prompt_is_skipped_and_counted(server: ScriptedJudge, tmp_path: Path) -> None:
    def lies(request: Request) -> bytes:
        return completion("7 of 10") if "blue" in json.dumps(request["messages"]) else honest(request)

    server.behaviour = lies
    run = train(tmp_path, "sync", *judged(server), "reward.on_error=skip", "reward.retries=1", code=3)
    skipped = [event for event in run.events if event["event"] == "skipped" and event["kind"] == "train"]
    assert len(skipped) == STEPS
    assert all("the judge's answer is no JSON: '7 of 10'" in event["message"] for event in skipped)
    assert sum(line["total"] is None for line in lines(tmp_path / "scores.jsonl")) == STEPS
    assert all(value > 0 for value in run.column("reward/mean"))
