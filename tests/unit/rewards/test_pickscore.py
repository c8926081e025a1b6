"""Tests of PickScore on a tiny random CLIP: the formula, chunks, and refusals."""

from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.policies.tiny import clip_tokenizer
from async_flowrl.rewards.clip import Clip, PickScore
from async_flowrl.rewards.registry import build_reward, check_rewards
from async_flowrl.types import Prompt

PROMPT = Prompt(0, "a red fox, and then a very long line of words that no CLIP takes in whole when it counts letters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("clip"), clip_tokenizer()
    tokenizer.model_max_length = 77
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 77,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**text, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def pictures(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3)).astype(np.uint8)


def test_the_score_is_the_scaled_cosine_of_image_and_text(folder: Path) -> None:
    images = pictures(5)
    scores = PickScore(str(folder), str(folder), scale=2.0, batch_size=2)(images, PROMPT)
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=[PROMPT.text], images=list(images), truncation=True, max_length=77, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == 77
    with torch.no_grad():
        out = model(**inputs)
        cosine = torch.nn.functional.cosine_similarity(out.image_embeds, out.text_embeds)
    assert scores == pytest.approx((model.logit_scale.exp() * cosine / 2).tolist(), rel=1e-5)
    assert len(set(scores)) == 5
    assert scores == PickScore(str(folder), str(folder), scale=2.0, batch_size=2)(images, PROMPT)


def test_another_prompt_scores_differently(folder: Path) -> None:
    reward = PickScore(str(folder), str(folder))
    assert reward(pictures(1), PROMPT) != reward(pictures(1), Prompt(1, "a snow leopard"))


def test_it_is_built_without_its_weights() -> None:
    options = {"model": "/nowhere", "batch_size": 4}
    config = RewardConfig(terms={"pickscore": RewardTerm(weight=0.5, options=options)})
    assert not check_rewards(config)
    assert build_reward(config).weights == {"pickscore": 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.0}, "scale must be a finite number above 0, got 0.0"),
        ({"scale": float("inf")}, "scale must be a finite number above 0, got inf"),
        ({"scale": "half"}, "scale must be a finite number above 0, got 'half'"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
        ({"device": "gpu"}, r"device must be one of .*, got 'gpu'"),
        ({"device": "auto:0"}, r"device must be one of .*, got 'auto:0'"),
        ({"device": "cuda:one"}, r"device must be one of .*, got 'cuda:one'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=f"reward.terms.pickscore: .*{message}"):
        build_reward(RewardConfig(terms={"pickscore": RewardTerm(options=dict(options))}))


def test_a_gpu_that_the_process_does_not_see_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device is cuda, and this process sees no GPU.* use auto or cpu"):
        PickScore(str(folder), str(folder), device="cuda")(pictures(1), PROMPT)
    assert len(PickScore(str(folder), str(folder), device="auto")(pictures(1), PROMPT)) == 1


def test_two_threads_that_ask_at_once_load_the_model_once(folder: Path) -> None:
    built: list[CLIPModel] = []
    waits, go_on = Event(), Event()

    def build() -> Any:
        waits.set()
        assert go_on.wait(60)
        built.append(CLIPModel.from_pretrained(folder))
        return built[-1]

    clip = Clip("PickScore", str(folder), build=build)
    threads = [Thread(target=clip.load) for _ in range(2)]
    threads[0].start()
    assert waits.wait(60)
    threads[1].start()
    threads[1].join(0.2)  # long enough to come to the lock that the first thread holds
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(built) == 1
