"""Tests of the judge at an OpenAI-compatible endpoint: its requests, its reading of answers, and its place in a run."""

import asyncio
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from async_flowrl.config.schema import RewardConfig, RewardTerm, ServeConfig
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.ocr import text_score
from async_flowrl.rewards.registry import check_rewards, is_deterministic
from async_flowrl.rewards.vlm_judge import VLMJudge
from async_flowrl.rewards.worker import RewardWorker
from tests.support.scripted_judge import Request, ScriptedJudge, completion
from tests.unit.rewards.asked_judge import FAST, IMAGES, PROMPT, ask, by_pixel, judge, pixel, scores

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


def test_extra_body_adds_replaces_and_takes_away(server: ScriptedJudge) -> None:
    ask(judge(server, extra_body={"top_p": 0.8, "max_tokens": None, "max_completion_tokens": 9}, structured=False))
    (request,) = server.requests
    assert (request["top_p"], request["max_completion_tokens"]) == (0.8, 9)
    assert not {"max_tokens", "response_format"} & set(request)


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


def test_one_to_five(server: ScriptedJudge) -> None:
    server.behaviour = lambda request: completion("4", first={"4": math.log(0.75), "2": math.log(0.25)})
    (result,) = ask(judge(server, mode="probabilities", answers={n: n for n in range(1, 6)}))
    assert result["score"] == pytest.approx(3.5)
    assert result["p.1"] == 0.0


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
    for value in ("", "sk-\nsecret"):
        with pytest.raises(ServerError, match="api_key_env=JUDGE_KEY: this variable is n") as raised:
            ask(judge(server, api_key_env="JUDGE_KEY"))
        assert "secret" not in str(raised.value) and len(server.requests) == 1
        monkeypatch.setenv("JUDGE_KEY", value)


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
    with pytest.raises(ServerError, match="no server to ask yet"):
        ask(reward)
    reward.connect([server.url.removesuffix("/v1")], "t0ken")
    assert scores(reward) == [0.7]
    assert server.headers[0]["authorization"] == "Bearer t0ken"
