"""Tests of the answers that a judge's client keeps: nothing is asked twice, and another judge is asked anew."""

import re
from pathlib import Path
from typing import Any

import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.types import Prompt
from tests.support.scripted_judge import ScriptedJudge, completion
from tests.unit.rewards.asked_judge import IMAGES, ask, by_pixel, judge, pixel, scores

pytestmark = pytest.mark.usefixtures("no_pauses")


def test_nothing_is_asked_twice(server: ScriptedJudge, tmp_path: Path) -> None:
    server.behaviour = by_pixel
    first = judge(server, range=[0, 4])
    first.keep_in(tmp_path)
    before = ask(first, IMAGES)
    server.behaviour = lambda request: completion('{"score": 4}')
    resumed = judge(server, range=[0, 4])
    resumed.keep_in(tmp_path)
    after = ask(resumed, IMAGES)
    assert [r["score"] for r in after] == [r["score"] for r in before] == [0.0, 0.25, 0.5, 0.75]
    assert [r["text"] for r in after] == [r["text"] for r in before]
    assert ([r["cached"] for r in before], [r["cached"] for r in after]) == ([0.0] * 4, [1.0] * 4)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    "other",
    [{"model": "larger"}, {"version": "2"}, {"prompt_template": "{prompt}?"}, {"temperature": 0.5}, {"range": [0, 5]}],
    ids=str,
)
def test_another_judge_is_asked_anew(server: ScriptedJudge, tmp_path: Path, other: dict[str, Any]) -> None:
    server.behaviour = lambda request: completion('{"score": 1}')
    ask(judge(server, cache=str(tmp_path)))
    ask(judge(server, cache=str(tmp_path), **other))
    assert len(server.requests) == 2
    ask(judge(server, cache=str(tmp_path)), prompt=Prompt(0, "another prompt"))
    ask(judge(server, cache=str(tmp_path)), images=IMAGES[:1].reshape(1, 6, 8, 3))
    assert len(server.requests) == 4
    ask(judge(server, cache=str(tmp_path), base_url="http://127.0.0.1:9/v1"))


def test_equal_images_of_a_group_are_asked_once(server: ScriptedJudge) -> None:
    assert scores(judge(server), IMAGES[[0, 1, 0, 0]]) == [0.7] * 4
    assert len(server.requests) == 2


def test_what_was_answered_before_a_failure_is_kept(server: ScriptedJudge, tmp_path: Path) -> None:
    server.behaviour = lambda request: completion("?") if pixel(request) == 80 else by_pixel(request)
    reward = judge(server, range=[0, 4], cache=str(tmp_path))
    with pytest.raises(ServerError, match=r"is no JSON: '\?' \(1 of 4 calls failed\)"):
        ask(reward, IMAGES)
    server.behaviour = by_pixel
    assert scores(judge(server, range=[0, 4], cache=str(tmp_path)), IMAGES) == [0.0, 0.25, 0.5, 0.75]
    assert len(server.requests) == 5


def test_a_line_that_a_kill_left_unfinished_is_asked_again(server: ScriptedJudge, tmp_path: Path) -> None:
    ask(judge(server, cache=str(tmp_path)), IMAGES[:2])
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-7])
    assert len(scores(judge(server, cache=str(tmp_path)), IMAGES[:2])) == 2
    assert len(server.requests) == 3
    path.write_text("not a line of ours\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: byte 0 begins no kept reply; delete the file")):
        ask(judge(server, cache=str(tmp_path)))
