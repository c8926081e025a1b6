"""Tests of the judge with a real vision-language model behind a real server: scores are the model's probabilities."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.rewards.ocr import text_score
from async_flowrl.rewards.vlm_judge import Picture, VLMJudge
from async_flowrl.types import Prompt
from tests.support.tiny_judge import NAME, TinyVLM, tiny_judge

PROMPT = Prompt(0, 'a red sign "abc"', target="abc")
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def vlm() -> TinyVLM:
    return TinyVLM()


@pytest.fixture(scope="module")
def url(vlm: TinyVLM) -> Iterator[str]:
    with tiny_judge(vlm) as base_url:
        yield base_url


def ask(reward: VLMJudge) -> list[dict[str, Any]]:
    return asyncio.run(reward(IMAGES, PROMPT))


def messages(question: str, image: Any) -> list[dict[str, Any]]:
    picture = {"type": "image_url", "image_url": {"url": Picture(image).url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]


def test_the_score_is_the_expectation_of_the_models_own_probabilities(vlm: TinyVLM, url: str) -> None:
    bias = {vlm.id_of("A"): 12.0, vlm.id_of("B"): 12.0}
    options = {"answers": {"A": 1.0, "B": -1.0}, "prompt_template": "{prompt}: A or B?", "min_mass": 0.9}
    extra = {"logit_bias": {str(token): value for token, value in bias.items()}}
    results = ask(VLMJudge(url, NAME, "probabilities", extra_body=extra, **options))  # type: ignore[arg-type]
    for image, result in zip(IMAGES, results, strict=True):
        _, (log_probs, *_) = vlm.generate(messages(f"{PROMPT.text}: A or B?", image), 1, bias)
        a, b = (float(log_probs[token].exp()) for token in bias)
        assert result["score"] == pytest.approx((a - b) / (a + b), rel=1e-9)
        assert (result["p.A"], result["p.B"]) == (pytest.approx(a), pytest.approx(b))
    assert len({result["score"] for result in results}) == len(IMAGES), "the model does not look at the image"


@pytest.mark.extended
def test_the_transcription_is_what_the_model_writes(vlm: TinyVLM, url: str) -> None:
    results = ask(VLMJudge(url, NAME, "transcribe", prompt_template="Read.", max_tokens=8))
    for image, result in zip(IMAGES, results, strict=True):
        ids, _ = vlm.generate(messages("Read.", image), 8, {})
        written = vlm.tokenizer.decode(ids, skip_special_tokens=True)
        assert (result["text"], result["score"]) == (written, text_score(written, "abc"))


@pytest.mark.extended
def test_asking_twice_gives_the_same_bits(url: str) -> None:
    reward = VLMJudge(url, NAME, "probabilities", min_mass=0.0, answers={chr(n): n for n in range(33, 97)})
    assert torch.equal(*(torch.tensor([r["score"] for r in ask(reward)], dtype=torch.float64) for _ in range(2)))
