"""Tests of rewards that get the images that a prompt edits, in the run itself, over HTTP and in a judge's question."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_flowrl.cli.reward_server import warm_up
from async_flowrl.cli.serve_rewards import scorer
from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.data.condition_images import examined
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import ContractError, Limits, encode_image, read_request, request_body
from async_flowrl.rewards.image_statistics import EditConsistency
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.types import ByteArray, Prompt, Scores
from tests.support.reward_server import served
from tests.support.scripted_judge import Request, completion, scripted_judge
from tests.unit.rewards import own_rewards
from tests.unit.rewards.asked_judge import judge, pixel
from tests.unit.rewards.own_rewards import own, scored

IMAGES = np.array([7, 9, 30], dtype=np.uint8)[:, None, None, None] * np.ones((3, 8, 12, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNC_FLOWRL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def edit(tmp_path: Path) -> Prompt:
    """A prompt of two images, of which the second, twice as large as the results, is 10 everywhere."""
    for name, value, size in (("a.png", 200, (5, 4)), ("b.png", 10, (24, 16))):
        Image.new("RGB", size, (value, value, value)).save(tmp_path / name)
    return Prompt(0, "both", images=tuple(examined(tmp_path / name) for name in ("a.png", "b.png")))


def score(prompt: Prompt, images: ByteArray = IMAGES, **terms: RewardTerm) -> Scores:
    return scored(RewardConfig(terms=terms, backoff=0.0), prompt, images)


def test_a_reward_gets_the_images_of_its_prompt_which_are_read_once(edit: Prompt) -> None:
    own_rewards.seen.clear()
    terms = {"group": own("near_its_source", bonus=1.0), "one": own("OneNearItsSource"), "old": own("first_pixel")}
    scores = score(edit, **terms)
    assert scores.by_term == {"group": (-2.0, 0.0, -19.0), "one": (-3.0, -1.0, -20.0), "old": (7.0, 9.0, 30.0)}
    first, *others = own_rewards.seen
    assert len(others) == 3 and all(each is first for each in others)
    assert [source.shape for source in first] == [(4, 5, 3), (16, 24, 3)] and first[0].dtype == np.uint8


def test_a_changed_image_is_a_failure_that_names_it(edit: Prompt, tmp_path: Path) -> None:
    Image.new("RGB", (5, 4)).save(tmp_path / "a.png")
    scores = score(edit, group=own("near_its_source"), old=own("first_pixel"))
    assert scores.by_term.keys() == {"old"} and str(tmp_path / "a.png") in scores.failed["group"].reason


def test_prompts_without_images_and_other_signatures_are_refused_at_the_start(edit: Prompt) -> None:
    config = RewardConfig(terms={"near": own("near_its_source"), "old": own("first_pixel")})
    check = prompt_check(config)
    assert check is not None and prompt_check(RewardConfig(terms={"old": own("first_pixel")})) is None
    check(edit)
    with pytest.raises(ValueError, match=r"^reward 'near' .*'plain' has no image"):
        check(Prompt(0, "plain"))
    with pytest.raises(ValueError, match=r"^reward\.terms\.bad: .*\(images, prompt, sources\)"):
        check_rewards(RewardConfig(terms={"bad": own("takes_no_sources")}))
    with pytest.raises(ValueError, match=r"^reward\.terms\.near\.options: .*bonuss.*bonus"):
        check_rewards(RewardConfig(terms={"near": own("near_its_source", bonuss=1.0)}))


def test_consistency_is_the_distance_outside_of_the_box(edit: Prompt) -> None:
    source = np.full((16, 24, 3), 10, dtype=np.uint8)
    source[:, :12] = 110
    result = np.full((8, 12, 3), 10, dtype=np.uint8)
    images = np.stack([result, np.where(np.arange(12)[:, None] < 6, 110, 10) + np.zeros_like(result)]).astype(np.uint8)
    reward = EditConsistency()
    assert reward(images, edit, [source]) == [pytest.approx(1 - 50 / 255), 1.0]
    prompt = replace(edit, images=edit.images[1:], metadata={"edit_box": [0, 0, 12, 16]})
    reward.check(prompt)
    assert reward(images, prompt, [source]) == [1.0, 1.0]
    half = replace(prompt, metadata={"edit_box": [0, 0, 12, 8]})
    assert reward(images[:1], half, [source]) == [pytest.approx(1 - 100 / 255 / 3)], "24 of 72 pixels differ by 100"
    nan = float("nan")
    refused = [[0, 0, 24, 16], [5, 5, 5, 9], [0, 0, 9], "all", {"left": 0}]
    for wrong in (*refused, [nan, 0, 9, 9], [0, 0, math.inf, 9], [24, 0, 30, 9], [-9, -9, 0, 9]):
        with pytest.raises(ValueError, match="edit_box"):
            reward.check(replace(prompt, metadata={"edit_box": wrong}))
    thin = score(replace(prompt, metadata={"edit_box": [0, 0, 24, 15.5]}), edit_consistency=RewardTerm())
    assert thin.failed["edit_consistency"].refused, "one row of the source is left, none of the result"
    check = prompt_check(RewardConfig(terms={"edit_consistency": RewardTerm()}), [(16, 24), (64, 104)])
    assert check is not None
    check(prompt)
    check(replace(prompt, resolution=(8, 12)))
    for shape, sizes in ((16, []), (None, [(16, 24), 16])):
        check = prompt_check(RewardConfig(terms={"edit_consistency": RewardTerm()}), sizes)
        with pytest.raises(ValueError, match=r"16 × 16 px .*, its source 16 × 24"):
            check(replace(prompt, resolution=shape))
    square = score(edit, IMAGES[:, :, :8], edit_consistency=RewardTerm())
    assert square.failed["edit_consistency"].refused and "8 × 8" in square.failed["edit_consistency"].reason


@pytest.mark.extended
@pytest.mark.parametrize("encoding", ["png", "multipart"])
@pytest.mark.parametrize("batch", ["group", "one_by_one"])
def test_a_server_gets_sources_and_has_the_scores_of_the_run_itself(batch: str, encoding: str, edit: Prompt) -> None:
    terms = {"near": own("near_its_source"), "old": own("first_pixel")}
    with served(scorer(RewardConfig(terms=terms))) as url:
        far = {"url": url, "sources": True, "retries": 0, "batch": batch, "encoding": encoding}
        scores = score(edit, http=RewardTerm(options=far))
        assert scores.total == score(edit, **terms).total == (4.0, 8.0, 10.0)
        with pytest.raises(ServerError, match=r"answered 400 .*sources=true"):
            asyncio.run(HTTP(url, retries=0)(IMAGES, edit, []))
        videos = np.stack([IMAGES, IMAGES])
        mixed = HTTP(url, sources=True, video=True, retries=0, batch=batch, encoding=encoding)
        found = asyncio.run(mixed(videos, edit, [np.full((4, 4, 3), 9, np.uint8)]))
        assert [each["score"] for each in found] == pytest.approx([(5 + 9 + 9) / 3] * 2), "mean of the frames"


def test_a_source_beyond_the_limit_of_a_server_is_sent_smaller(edit: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limits, "pixels", 100)
    seen: list[tuple[int, ...]] = []

    def score_them(images: ByteArray, prompt: Prompt, sources: list[ByteArray]) -> list[float]:
        seen.extend(source.shape for source in sources)
        return [0.0] * len(images)

    score_them.sources = True  # type: ignore[attr-defined]
    with served(score_them) as url:
        reward = HTTP(url, sources=True, retries=0)
        sources = [np.zeros((16, 24, 3), np.uint8), np.zeros((5, 20, 3), np.uint8), np.zeros((15, 14, 3), np.uint8)]
        assert asyncio.run(reward(IMAGES, edit, sources)) == [0.0] * 3
    assert seen == [(8, 12, 3), (5, 20, 3), (10, 9, 3)]
    large = replace(edit, images=edit.images[1:])
    reward.check(large)
    reward.check(replace(edit, metadata={"edit_box": [0, 0, 1, 1]}))
    with pytest.raises(ValueError, match="edit_box"):
        reward.check(replace(large, metadata={"edit_box": [0, 0, 9, 9]}))


def test_servers_that_know_no_sources_refuse_them_by_name(edit: Prompt) -> None:
    refused = pytest.raises(ServerError, match=r"answered 400 .*sources=false")
    with served(lambda images, prompt: [0.0] * len(images)) as url, refused:
        asyncio.run(HTTP(url, sources=True, retries=0)(IMAGES, edit, [IMAGES[0]]))
    assert json.loads(request_body([b""], [{"text": "a", "sources": 1}]))["version"] == 3
    assert json.loads(request_body([b""], [{"text": "a"}]))["version"] == 1


def test_each_prompt_of_a_request_has_its_own_sources() -> None:
    grey = [np.full((4, 4, 3), value, dtype=np.uint8) for value in (5, 6, 8, 1, 2)]
    files = [encode_image(image, "png") for image in grey]
    fields = json.loads(request_body(files, [{"text": "a", "sources": 1}, {"text": "a", "sources": 2}]))
    request = read_request(fields, None, Limits())
    assert [len(request.prompts), request.sources, request.frames] == [2, [1, 2], None]
    calls: list[tuple[int, list[int]]] = []

    def score_them(images: ByteArray, prompt: Prompt, sources: list[ByteArray]) -> list[float]:
        assert [image.size for image in prompt.images] == [source.shape[:2] for source in sources]
        calls.append((len(images), [int(source[0, 0, 0]) for source in sources]))
        return [0.0] * len(images)

    score_them.sources = True  # type: ignore[attr-defined]
    warm_up(score_them, "a")
    assert calls.pop() == (1, [128])
    with served(score_them) as url:
        import httpx

        assert httpx.post(f"{url}/v1/score", json=fields).json()["scores"] == [0.0, 0.0]
    assert calls == [(1, [8]), (1, [1, 2])], "images of one text with different sources are no group"
    wrong: list[Any] = [0, True, "1", None, 5]
    for number in wrong:
        with pytest.raises(ContractError):
            read_request({**fields, "prompts": [{"text": "a", "sources": number}]}, None, Limits())
    with pytest.raises(ContractError, match=r"^sources"):
        read_request({**fields, "prompts": [{"text": "a", "sources": 5}]}, None, Limits())
    for version in (1, 2):
        with pytest.raises(ContractError):
            read_request({**fields, "version": version}, None, Limits())


def test_a_judge_sees_the_sources_before_each_result(edit: Prompt) -> None:
    numbers = {7: [9, 4, 10], 9: [0, 10, 10], 30: [10, 10, 10]}

    def answer(request: Request) -> bytes:
        assert [pixel(request, place) for place in range(2)] == [200, 10]
        return completion(json.dumps({"scores": numbers[pixel(request, 2)]}))

    with scripted_judge(answer) as server:
        reward = judge(server, mode="edit", sources=True)
        sources = [np.full((90, 60, 3), 200, np.uint8), np.full((4, 4, 3), 10, np.uint8)]
        found = asyncio.run(reward(IMAGES, edit, sources))
        assert [each["score"] for each in found] == [pytest.approx(math.sqrt(0.4)), 0.0, 1.0]
        assert (found[0]["success"], found[0]["restraint"], found[0]["quality"]) == (0.9, 0.4, 1.0)
        schema = server.requests[0]["response_format"]["json_schema"]["schema"]["properties"]["scores"]
        assert schema["minItems"] == schema["maxItems"] == 3
        question = server.requests[0]["messages"][0]["content"][-1]["text"]
        assert "both" in question and "3 images" in question
        raw = asyncio.run(judge(server, mode="edit", sources=True, normalise=False)(IMAGES[:1], edit, sources))
        assert raw[0]["score"] == pytest.approx(10 * math.sqrt(0.4))
        server.behaviour = lambda request: completion(json.dumps({"score": 5}))
        (one,) = asyncio.run(judge(server, sources=True)(IMAGES[:1], edit, sources))
        assert one["score"] == 0.5 and "{" not in server.requests[-1]["messages"][0]["content"][-1]["text"][:80]
    for wrong in ({"mode": "edit"}, {"sources": True, "images": "group"}, {"sources": True, "video": True}):
        with pytest.raises(ValueError, match="sources=true"):
            judge(server, **wrong)
