"""Tests of a judge that answers nonsense or not at all: what is no score is an error, what may pass is tried again."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.vlm_judge import VLMJudge
from tests.support.scripted_judge import Request, ScriptedJudge, completion, http, scripted_judge
from tests.unit.rewards.asked_judge import FAST, IMAGES, ask, by_pixel, judge, scores

pytestmark = pytest.mark.usefixtures("no_pauses")

LIES = {
    "NaN": (completion('{"score": NaN}'), "is no JSON"),
    "infinity": (completion('{"score": 1e999}'), "answered inf, outside of 0 .. 10"),
    "out of range": (completion('{"score": 11}'), r"answered 11, outside of 0 \.\. 10"),
    "a word": (completion('{"score": "7"}'), "'7' where a number was due"),
    "a truth": (completion('{"score": true}'), "True where a number was due"),
    "prose": (completion("I would give it a 7 of 10."), r"is no JSON: 'I would give it a 7 of 10\.' \(1 of"),
    "thoughts": (completion('<think>a cup</think>{"score": 6}'), """is no JSON: .*; after='"score":' would read"""),
    "text around": (completion('Here: {"score": 6}. Bye'), """is no JSON: .*; after='"score":' would read"""),
    "another key": (completion('{"rating": 7}'), "has no 'score'"),
    "half an answer": (completion('{"score": 7', reason="length"), "no JSON, cut off at max_tokens"),
    "half a number": (completion("1", reason="length"), "is a number cut off at max_tokens: '1'"),
    "several": (completion('{"score": [7, 8]}'), "where a number was due"),
    "nothing": (completion(None), "gave no text"),
    "filtered": (completion("", reason="content_filter"), "finish_reason 'content_filter'"),
    "HTML": (http("<html><body>Sign in</body></html>"), "the reply is not JSON .*: '<html>"),
    "an error as success": (http('{"error": "no such model"}'), "no chat completion: .*no such model"),
    "a list": (http("[1]"), "must be a JSON object, got list"),
    "NaN in the reply": (http('{"choices": NaN}'), "NaN is not a JSON number"),
    "bytes": (http(b"\xff\xfe\x00"), "the reply is not JSON"),
    "elsewhere": (
        http("", "302 Found", "Location: http://127.0.0.1:9/v1"),
        "answered 302, a redirect to .*not followed",
    ),
    "refused": (http('{"error": "bad key sk-secret"}', "401 Unauthorized"), r"401 Unauthorized: .*bad key \*\*\*"),
    "conflict": (http("", "409 Conflict"), "409 Conflict"),
    "endless": (http(b"1" * (4 * 2**20 + 1)), "more than 4194304 bytes"),
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


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (None, "sends no log-probabilities"),
        ({"Maybe": -0.1}, "hold 0 of the probability"),
        ({"yes": 3.0}, "3.0 where a log-probability was due"),
        ({"yes": "high"}, "'high' where a log-probability was due"),
    ],
)
def test_probabilities_that_are_none(server: ScriptedJudge, first: Any, message: str) -> None:
    server.behaviour = lambda request: completion("yes", first=first)
    with pytest.raises(ServerError, match=message):
        ask(judge(server, mode="probabilities"))


@pytest.mark.parametrize("count", [3, 5])
def test_a_group_with_another_number_of_scores(server: ScriptedJudge, count: int) -> None:
    server.behaviour = lambda request: completion(json.dumps({"scores": [1] * count}))
    with pytest.raises(ServerError, match="asked for 4 scores"):
        ask(judge(server, images="group"), IMAGES)


@pytest.mark.parametrize(
    "trouble",
    [
        http("busy", "429 Too Many Requests"),
        http("", "408 Request Timeout"),
        http("down", "503 Service Unavailable"),
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\nConnection: close\r\n\r\n{",
    ],
    ids=["429", "408", "503", "closed", "half a reply"],
)
def test_what_may_pass_is_tried_again(server: ScriptedJudge, trouble: bytes) -> None:
    server.behaviour = lambda request: trouble if len(server.requests) < 3 else completion('{"score": 5}')
    assert scores(judge(server, retries=2)) == [0.5]
    assert len(server.requests) == 3
    server.behaviour = lambda request: trouble
    with pytest.raises(ServerError, match=r"\(attempt 3, the last\)"):
        ask(judge(server, retries=2))


def test_nobody_there() -> None:
    with pytest.raises(ServerError, match=r"ConnectError.*\(attempt 2, the last\)"):
        ask(VLMJudge(base_url="http://127.0.0.1:9/v1", **FAST, retries=1))  # type: ignore[arg-type]


def test_retry_after_is_honoured_and_not_waited_for_beyond_the_deadline(server: ScriptedJudge) -> None:
    busy = http("later", "429 Too Many Requests", "Retry-After: 0")
    server.behaviour = lambda request: busy if len(server.requests) < 2 else completion('{"score": 5}')
    assert scores(judge(server)) == [0.5]
    server.behaviour = lambda request: http("later", "429 Too Many Requests", "Retry-After: 3600")
    with pytest.raises(
        ServerError, match=r"429 Too Many Requests: 'later'; it asks to wait 3600 s, longer than the deadline of 60 s"
    ):
        ask(judge(server))


def test_a_judge_that_stalls_is_given_up(server: ScriptedJudge) -> None:
    async def stalls(request: Request) -> bytes:
        await asyncio.sleep(600)
        return b""

    server.behaviour = stalls
    with pytest.raises(ServerError, match=r"no answer within 0\.05 s"):
        ask(judge(server, timeout=0.05))


def test_replicas_take_turns_and_stand_in_for_each_other(server: ScriptedJudge) -> None:
    server.behaviour = by_pixel
    with scripted_judge(by_pixel) as second:
        reward = judge(server, base_url=[server.url, second.url], range=[0, 4])
        assert scores(reward, np.stack([np.full((8, 6, 3), n * 10, np.uint8) for n in range(16)])) != []
        assert server.requests
        assert second.requests
    assert scores(reward, IMAGES) == [0.0, 0.25, 0.5, 0.75]
