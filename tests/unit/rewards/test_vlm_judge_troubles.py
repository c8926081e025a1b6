"""Tests of a judge that answers nonsense or not at all: what is no score is an error, what may pass is tried again."""

import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from tests.support.scripted_judge import ScriptedJudge, completion, http, scripted_judge
from tests.unit.rewards.asked_judge import IMAGES, ask, by_pixel, judge, scores

pytestmark = pytest.mark.usefixtures("no_pauses")

LIES = {
    "NaN": (completion('{"score": NaN}'), "is no JSON"),
    "out of range": (completion('{"score": 11}'), r"answered 11, outside of 0 \.\. 10"),
    "a word": (completion('{"score": "7"}'), "'7' where a number was due"),
    "thoughts": (completion('<think>a cup</think>{"score": 6}'), """is no JSON: .*; after='"score":' would read"""),
    "another key": (completion('{"rating": 7}'), "has no 'score'"),
    "half an answer": (completion('{"score": 7', reason="length"), "no JSON, cut off at max_tokens"),
    "nothing": (completion(None), "gave no text"),
    "filtered": (completion("", reason="content_filter"), "finish_reason 'content_filter'"),
    "refused": (http('{"error": "bad key sk-secret"}', "401 Unauthorized"), r"401 Unauthorized: .*bad key \*\*\*"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_and_is_not_asked_again(
    server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    response, message = LIES[name]
    server.behaviour = lambda request: response
    with pytest.raises(ServerError, match=message) as error:
        ask(judge(server, api_key_env="JUDGE_KEY"))
    assert "\n" not in str(error.value)
    assert "sk-secret" not in str(error.value)
    assert len(server.requests) == 1


def test_a_model_that_thinks_aloud_is_read_behind_the_name_of_the_score(server: ScriptedJudge) -> None:
    server.behaviour = lambda request: completion('<think>{"score": 1}? no</think>\n{"score": 6, "why": "a cup"}')
    assert scores(judge(server, after='"score":')) == [0.6]


def test_replicas_take_turns_and_stand_in_for_each_other(server: ScriptedJudge) -> None:
    server.behaviour = by_pixel
    with scripted_judge(by_pixel) as second:
        reward = judge(server, base_url=[server.url, second.url], range=[0, 4])
        assert scores(reward, np.stack([np.full((8, 6, 3), n * 10, np.uint8) for n in range(16)])) != []
        assert server.requests
        assert second.requests
    assert scores(reward, IMAGES) == [0.0, 0.25, 0.5, 0.75]
