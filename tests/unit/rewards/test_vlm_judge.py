"""Tests of the judge at an OpenAI-compatible endpoint: its requests, its reading of answers, and its place in a run."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.ocr import text_score
from async_flowrl.types import Prompt
from tests.support.lying_server import answer
from tests.support.scripted_judge import Request, ScriptedJudge, completion, scripted_judge
from tests.unit.rewards.asked_judge import IMAGES, PROMPT, ask, by_pixel, judge, pixel, scores

pytestmark = pytest.mark.usefixtures("no_pauses")


def test_every_image_gets_the_score_of_its_own_answer_and_equal_images_are_asked_once(server: ScriptedJudge) -> None:
    server.behaviour = by_pixel
    assert scores(judge(server, range=[0, 4]), IMAGES) == [0.0, 0.25, 0.5, 0.75]
    assert scores(judge(server, range=[0, 4], normalise=False), IMAGES[[0, 1, 0, 3]]) == [0.0, 1.0, 0.0, 3.0]
    assert len(server.requests) == 4 + 3


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


NUMBERS = ("4.5.1", "4,5", "1,000", "7-8", "7 – 8", "4.5/5", "4.5 / 5", "**4**/5")
"""What is no single number, although it begins like one."""


def test_the_number_behind_a_text_of_a_free_answer(server: ScriptedJudge) -> None:
    """UnifiedReward's way; an image that shows the words is quoted before the verdict, so the last ones count."""
    answers = {
        "cup (object): 1\nFinal Score: 4.5": 0.9,
        'It reads "Final Score: 5".\n**Final Score:** 2': 0.4,
        "Final Score: 0": 0.0,
        "Final Score: 4.": 0.8,
        "Final Score: 4, as 2 of 3 cups are red": 0.8,
        "Final Score: **3**\n- 2 cups": 0.6,
    }
    unified = judge(server, after="Final Score:", range=[0, 5])
    for said, expected in answers.items():
        server.behaviour = lambda request, said=said: completion(said)  # type: ignore[misc]
        assert scores(unified, IMAGES[:1]) == [expected]
    assert "response_format" not in server.requests[0]
    server.behaviour = lambda request: completion('<think>{"score": 1}? no</think>\n{"score": 6, "why": "a cup"}')
    assert scores(judge(server, after='"score":')) == [0.6], "a model that thinks aloud"
    lies = {
        "Final Score: high": r"has no single number after 'Final Score:': 'Final Score: high'",
        "4.5": r"has no single number after 'Final Score:'",
        "Final Score: 6": r"answered 6\.0, outside of 0 \.\. 5",
        "Final Score: nan": "has no single number",
        **{f"Final Score: {number}": "has no single number" for number in NUMBERS},
    }
    for said, message in lies.items():
        server.behaviour = lambda request, said=said: completion(said)  # type: ignore[misc]
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


def test_a_video_is_one_question_with_several_of_its_frames(server: ScriptedJudge) -> None:
    videos = np.stack([IMAGES, IMAGES[::-1]])
    server.behaviour = by_pixel
    reward = judge(server, video=True, frames=3, range=[0, 4])
    assert scores(reward, videos) == [0.0, 0.75], "by the first frame of each"
    for request in server.requests:
        urls = [part for part in request["messages"][-1]["content"] if part["type"] == "image_url"]
        assert len(urls) == 3 and {pixel(request, 0), pixel(request, 2)} == {0, 120}
        assert " 3 " in request["messages"][-1]["content"][-1]["text"]
    with pytest.raises(ValueError, match="images=group"):
        judge(server, video=True, images="group")


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


@pytest.mark.extended
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


LIES = {
    "NaN": (completion('{"score": NaN}'), "is no JSON"),
    "out of range": (completion('{"score": 11}'), r"answered 11, outside of 0 \.\. 10"),
    "a word": (completion('{"score": "7"}'), "'7' where a number was due"),
    "thoughts": (completion('<think>a cup</think>{"score": 6}'), """is no JSON: .*; after='"score":' would read"""),
    "another key": (completion('{"rating": 7}'), "has no 'score'"),
    "half an answer": (completion('{"score": 7', reason="length"), "no JSON, cut off at max_tokens"),
    "nothing": (completion(None), "gave no text"),
    "filtered": (completion("", reason="content_filter"), "finish_reason 'content_filter'"),
    "refused": (answer("401 Unauthorized", '{"error": "bad key sk-secret"}'), r"401 Unauthorized: .*bad key \*\*\*"),
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


def test_replicas_take_turns_and_stand_in_for_each_other(server: ScriptedJudge) -> None:
    server.behaviour = by_pixel
    with scripted_judge(by_pixel) as second:
        reward = judge(server, base_url=[server.url, second.url], range=[0, 4])
        ask(reward, np.stack([np.full((8, 6, 3), n * 10, np.uint8) for n in range(16)]))
        assert server.requests and second.requests
    assert scores(reward, IMAGES) == [0.0, 0.25, 0.5, 0.75]
