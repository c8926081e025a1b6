"""Test of a run with a judge at a server that answers wrongly."""

import json
from pathlib import Path

import pytest

from tests.integration.runs import lines, train
from tests.support.scripted_judge import Request, completion, scripted_judge

STEPS = 3


def lies(request: Request) -> bytes:
    return completion("7 of 10" if "blue" in json.dumps(request["messages"]) else '{"score": 0.5}')


@pytest.mark.extended
def test_a_judge_that_lies_about_one_prompt_is_skipped_and_counted(tmp_path: Path) -> None:
    with scripted_judge(lies) as server:
        term = f"{{name: vlm_judge, options: {{base_url: '{server.url}', model: tiny, range: [0, 1]}}}}"
        judged = ("~reward.terms.color", f"+reward.terms={{judge: {term}}}", f"total_steps={STEPS}", "reward.backoff=0")
        run = train(tmp_path, "sync", *judged, "reward.on_error=skip", "reward.retries=1", code=3)
    skipped = [event for event in run.events if event["event"] == "skipped" and event["kind"] == "train"]
    assert len(skipped) == STEPS
    assert all("the judge's answer is no JSON: '7 of 10'" in event["message"] for event in skipped)
    assert sum(line["total"] is None for line in lines(tmp_path / "scores.jsonl")) == STEPS
    assert all(value > 0 for value in run.column("reward/mean"))
