"""Tests of the judge at an OpenAI-compatible endpoint: its requests, its reading of answers, and its place in a run."""

import json
import math

import numpy as np
import pytest

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.ocr import text_score
from tests.support.scripted_judge import Request, ScriptedJudge, completion
from tests.unit.rewards.asked_judge import IMAGES, PROMPT, ask, by_pixel, judge, pixel, scores

pytestmark = pytest.mark.usefixtures("no_pauses")


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
    for answer, expected in answers.items():
        server.behaviour = lambda request, answer=answer: completion(answer)  # type: ignore[misc]
        assert scores(unified, IMAGES[:1]) == [expected]
    assert "response_format" not in server.requests[0]
    lies = {
        "Final Score: high": r"has no single number after 'Final Score:': 'Final Score: high'",
        "4.5": r"has no single number after 'Final Score:'",
        "Final Score: 6": r"answered 6\.0, outside of 0 \.\. 5",
        "Final Score: nan": "has no single number",
        **{f"Final Score: {number}": "has no single number" for number in NUMBERS},
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
