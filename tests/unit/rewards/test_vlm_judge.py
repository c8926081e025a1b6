"""Tests of the judge at an OpenAI-compatible endpoint: its requests, its reading of answers, its refusals."""

import asyncio
import base64
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_flowrl.config.sections.reward import RewardConfig, RewardTerm, ServeConfig
from async_flowrl.rewards.http_post import ServerError
from async_flowrl.rewards.ocr import text_score
from async_flowrl.rewards.registry import build_reward, check_prompts, check_rewards, is_deterministic
from async_flowrl.rewards.vlm_judge import VLMJudge
from async_flowrl.rewards.worker import RewardWorker
from async_flowrl.types import Prompt
from tests.support.scripted_judge import Request, ScriptedJudge, completion, http, scripted_judge

PROMPT = Prompt(0, 'a sign that says "Open {target}"', target="Open")
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.full((4, 8, 6, 3), 40, dtype=np.uint8)
FAST = {"model": "tiny", "timeout": 20.0, "deadline": 60.0}


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    with scripted_judge(lambda request: completion('{"score": 7}')) as judge:
        yield judge


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_flowrl.rewards.http_post.BACKOFF_SECONDS", 0.001)


def judge(server: ScriptedJudge, **options: Any) -> VLMJudge:
    return VLMJudge(**{"base_url": server.url, **FAST, **options})


def ask(reward: VLMJudge, images: Any = IMAGES[:1], prompt: Prompt = PROMPT) -> list[dict[str, float | str]]:
    return asyncio.run(reward(images, prompt))


def scores(reward: VLMJudge, images: Any = IMAGES[:1]) -> list[float | str]:
    return [result["score"] for result in ask(reward, images)]


def pixel(request: Request, place: int = 0) -> int:
    """The first byte of the request's image number `place`, decoded as a server would."""
    url = [part for part in request["messages"][-1]["content"] if part["type"] == "image_url"][place]["image_url"][
        "url"
    ]
    content = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return int(np.asarray(Image.open(io.BytesIO(content)))[0, 0, 0])


def by_pixel(request: Request) -> bytes:
    return completion(json.dumps({"score": pixel(request) / 40}))


def test_every_image_gets_the_score_of_its_own_answer(server: ScriptedJudge) -> None:
    server.behaviour = by_pixel
    assert scores(judge(server, range=[0, 4]), IMAGES) == [0.0, 0.25, 0.5, 0.75]
    assert scores(judge(server, range=[0, 4], normalise=False), IMAGES) == [0.0, 1.0, 2.0, 3.0]


def test_what_is_asked(server: ScriptedJudge) -> None:
    template = 'How well? {prompt} {"score": x} from {min} to {max}'
    ask(judge(server, prompt_template=template, range=[1, 10], seed=3, system="You are strict."))
    (request,) = server.requests
    system, user = request["messages"]
    assert system == {"role": "system", "content": "You are strict."}
    assert user["content"][-1]["text"] == f'How well? {PROMPT.text} {{"score": x}} from 1 to 10'
    assert pixel(request) == 0
    assert (request["model"], request["temperature"], request["seed"], request["max_tokens"]) == ("tiny", 0.0, 3, 256)
    number = request["response_format"]["json_schema"]["schema"]["properties"]["score"]
    assert number == {"type": "number", "minimum": 1.0, "maximum": 10.0}


def test_extra_body_adds_replaces_and_takes_away(server: ScriptedJudge) -> None:
    ask(judge(server, extra_body={"top_p": 0.8, "max_tokens": None, "max_completion_tokens": 9}, structured=False))
    (request,) = server.requests
    assert (request["top_p"], request["max_completion_tokens"]) == (0.8, 9)
    assert not {"max_tokens", "response_format"} & set(request)


def test_the_number_behind_a_text_of_a_free_answer(server: ScriptedJudge) -> None:
    """UnifiedReward's way; an image that shows the words is quoted before the verdict, so the last ones count."""
    answers = ["cup (object): 1\nFinal Score: 4.5", 'It reads "Final Score: 5".\n**Final Score:** 2', "Final Score: 0"]
    unified = judge(server, after="Final Score:", range=[0, 5])
    for answer, expected in zip(answers, (0.9, 0.4, 0.0), strict=True):
        server.behaviour = lambda request, answer=answer: completion(answer)  # type: ignore[misc]
        assert scores(unified, IMAGES[:1]) == [expected]
    assert "response_format" not in server.requests[0]
    lies = {
        "Final Score: high": r"has no number after 'Final Score:'",
        "4.5": r"has no number after 'Final Score:'",
        "Final Score: 6": r"answered 6\.0, outside of 0 \.\. 5",
        "Final Score: nan": "has no number",
        "Final Score: 4.5.1": "has no number",
    }
    for answer, message in lies.items():
        server.behaviour = lambda request, answer=answer: completion(answer)  # type: ignore[misc]
        with pytest.raises(ServerError, match=message):
            ask(judge(server, after="Final Score:", range=[0, 5]), IMAGES[:1])
    server.behaviour = lambda request: completion("Final Score: 4", reason="length")
    with pytest.raises(ServerError, match="the judge's answer is cut off at max_tokens"):
        ask(judge(server, after="Final Score:", range=[0, 5]), IMAGES[:1])


def test_a_group_in_one_call(server: ScriptedJudge) -> None:
    def several(request: Request) -> bytes:
        return completion(json.dumps({"scores": [pixel(request, place) / 40 for place in range(4)]}))

    server.behaviour = several
    assert scores(judge(server, images="group", range=[0, 4]), IMAGES) == [0.0, 0.25, 0.5, 0.75]
    assert len(server.requests) == 1
    assert "These 4 images" in server.requests[0]["messages"][-1]["content"][-1]["text"]


def test_a_transcription_is_scored_as_the_ocr_reward_scores(server: ScriptedJudge) -> None:
    for said in ("open", "the sign says O p e n.", "Opan", "", "nothing at all like it"):
        server.behaviour = lambda request, said=said: completion(said)  # type: ignore[misc]
        assert scores(judge(server, mode="transcribe")) == [text_score(said, "Open")]


def test_a_transcription_that_is_cut_off_counts_only_where_its_end_does_not(server: ScriptedJudge) -> None:
    server.behaviour = lambda request: completion("xyzxyzxyz", reason="length")
    (result,) = ask(judge(server, mode="transcribe"))
    assert (result["score"], result["cut"]) == (0.0, 1.0)
    server.behaviour = lambda request: completion("Ope", reason="length")
    with pytest.raises(ServerError, match="cut off at max_tokens: 'Ope'"):
        ask(judge(server, mode="transcribe"))


def test_the_expectation_over_listed_answers(server: ScriptedJudge) -> None:
    first = {"Yes": math.log(0.5), " yes": math.log(0.1), "No": math.log(0.2), "Maybe": math.log(0.2)}
    server.behaviour = lambda request: completion("Yes", first=first)
    (result,) = ask(judge(server, mode="probabilities"))
    assert result["score"] == pytest.approx(0.6 / 0.8)
    assert (result["p.yes"], result["p.no"]) == (pytest.approx(0.6), pytest.approx(0.2))
    assert (server.requests[0]["logprobs"], server.requests[0]["top_logprobs"]) == (True, 20)
    with pytest.raises(
        ServerError, match=r"hold 0\.8 of the probability, less than min_mass=0\.9; the likeliest tokens"
    ):
        ask(judge(server, mode="probabilities", min_mass=0.9))


def test_one_to_five(server: ScriptedJudge) -> None:
    server.behaviour = lambda request: completion("4", first={"4": math.log(0.75), "2": math.log(0.25)})
    (result,) = ask(judge(server, mode="probabilities", answers={n: n for n in range(1, 6)}))
    assert result["score"] == pytest.approx(3.5)
    assert result["p.1"] == 0.0


LIES = {
    "NaN": (completion('{"score": NaN}'), "is no JSON"),
    "infinity": (completion('{"score": 1e999}'), "answered inf, outside of 0 .. 10"),
    "out of range": (completion('{"score": 11}'), r"answered 11, outside of 0 \.\. 10"),
    "a word": (completion('{"score": "7"}'), "'7' where a number was due"),
    "a truth": (completion('{"score": true}'), "True where a number was due"),
    "prose": (completion("I would give it a 7 of 10."), "is no JSON: 'I would give it a 7"),
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


def test_connections_are_pooled_and_capped(server: ScriptedJudge) -> None:
    async def late(request: Request) -> bytes:
        await asyncio.sleep(0.02)
        return by_pixel(request)

    server.behaviour = late
    images = np.stack([np.full((8, 6, 3), n, np.uint8) for n in range(12)])
    assert len(scores(judge(server, range=[0, 255], concurrency=3), images)) == 12
    assert (server.open_most, server.connections) == (3, 3)


def test_the_key_is_sent_and_its_absence_is_named(server: ScriptedJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    ask(judge(server, api_key_env="JUDGE_KEY"))
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ServerError, match="api_key_env=JUDGE_KEY: the reward worker's process has no such variable"):
        ask(judge(server, api_key_env="JUDGE_KEY"))


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


def test_what_another_process_adds_is_seen(server: ScriptedJudge, tmp_path: Path) -> None:
    one, other = (judge(server, cache=str(tmp_path)) for _ in range(2))
    ask(one, IMAGES[:1])
    ask(other, IMAGES[1:2])
    ask(one, IMAGES[1:2])
    ask(other, IMAGES[:1])
    assert len(server.requests) == 2
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_line_that_a_kill_left_unfinished_is_asked_again(server: ScriptedJudge, tmp_path: Path) -> None:
    ask(judge(server, cache=str(tmp_path)), IMAGES[:2])
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:-7])
    assert len(scores(judge(server, cache=str(tmp_path)), IMAGES[:2])) == 2
    assert len(server.requests) == 3
    path.write_text("not a line of ours\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}: byte 0 begins no kept reply; delete the file")):
        ask(judge(server, cache=str(tmp_path)))


def test_a_folder_that_cannot_be_written_is_a_warning(
    server: ScriptedJudge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert scores(judge(server, cache=str(tmp_path / "file" / "cache")), IMAGES[:2]) == [0.7, 0.7]
    assert "replies are no longer kept in" in caplog.text


def test_in_a_reward_worker(server: ScriptedJudge, tmp_path: Path) -> None:
    """Extras travel with the scores, a failure is the term's, and the cache is in the run directory."""
    options = {"base_url": server.url, **FAST}
    config = RewardConfig(terms={"judge": RewardTerm(name="vlm_judge", options=options)})
    assert not is_deterministic(config)
    worker = RewardWorker(config, index=0, name="reward-0", folder=tmp_path)
    try:
        scored = worker.score(PROMPT, IMAGES)
        assert scored.by_term == {"judge": (0.7,) * 4}
        assert scored.extras["judge"]["text"] == ('{"score": 7}',) * 4
        assert list((tmp_path / "judge_cache").glob("*.jsonl"))
        server.behaviour = lambda request: completion("NaN")
        failed = worker.score(PROMPT, IMAGES + np.uint8(1))
        assert "judge" not in failed.by_term
        assert re.search(r"reward 'judge' failed .* is no JSON: 'NaN' \(4 of 4", failed.failed["judge"].reason)
    finally:
        worker.close()


def test_a_server_that_the_run_starts_is_asked(server: ScriptedJudge) -> None:
    serve = ServeConfig(command="vllm serve tiny --port {port}", environment={"VLLM_API_KEY": "{token}"})
    term = RewardTerm(name="vlm_judge", options=FAST, serve=serve)
    assert not check_rewards(RewardConfig(terms={"judge": term}))
    reward = VLMJudge(**FAST)  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="no judge to ask yet"):
        ask(reward)
    reward.connect([server.url.removesuffix("/v1")], "t0ken")
    assert scores(reward) == [0.7]
    assert server.headers[0]["authorization"] == "Bearer t0ken"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"base_url": None},
            "needs options.base_url, for example http://127.0.0.1:8000/v1, or .*judge.serve for a server",
        ),
        ({"model": ""}, "needs model, the name that the server has for it"),
        ({"base_url": "localhost:8000"}, "must be like http://127.0.0.1:8000/v1, got 'localhost:8000'"),
        ({"base_url": "http://me:word@host/v1"}, "must hold no password"),
        ({"base_url": "http://host/v1/chat/completions"}, "ends before /chat/completions"),
        ({"mode": "scores"}, "mode must be one of .*'scores'; did you mean 'score'"),
        ({"images": "groups"}, "images must be one of .*; did you mean 'group'"),
        ({"images": "group", "mode": "transcribe"}, "images=group needs mode=score, got mode=transcribe"),
        ({"prompt_template": "How good?"}, r"must contain \{prompt\} or \{target\}, got 'How good\?'"),
        ({"prompt_template": "{prmpt}"}, "'prmpt'; did you mean 'prompt'"),
        ({"range": [1]}, "range must be two rising numbers"),
        ({"range": [10, 1]}, "range must be two rising numbers"),
        ({"temperature": "hot"}, "temperature must be a number from 0 to 2, got 'hot'"),
        ({"retries": 1.5}, "retries must be a whole number of at least 0"),
        ({"top_logprobs": 50}, "top_logprobs must be a whole number from 1 to 20"),
        ({"timeout": 300.0}, "deadline=60 is shorter than one attempt, timeout=300"),
        ({"answers": {True: 1, False: 0}}, "put yes and no in quotes"),
        ({"answers": {"yes": 1}}, "must be two or more"),
        ({"answers": {"1": 1, "10": 10, "5": 5}}, "'1' and '10' begin alike"),
        ({"answers": {"yes": "1", "no": 0}}, "must have finite numbers"),
        ({"temperatures": 1}, "'temperatures'; did you mean 'temperature'"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    term = RewardTerm(name="vlm_judge", options={"base_url": "http://127.0.0.1:9/v1", **FAST, **options})
    with pytest.raises(ValueError, match=message) as error:
        build_reward(RewardConfig(terms={"judge": term}))
    assert "reward.terms.judge" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{"mode": "transcribe"}, {"prompt_template": "Is {target} written in it?"}])
def test_a_prompt_without_a_target_is_refused_at_the_start(options: dict[str, str]) -> None:
    term = RewardTerm(name="vlm_judge", options={"base_url": "http://127.0.0.1:9/v1", **FAST, **options})
    with pytest.raises(ValueError, match="needs a target, and prompt 'a house' has none"):
        check_prompts(RewardConfig(terms={"judge": term}), [PROMPT, Prompt(1, "a house")])
