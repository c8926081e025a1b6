"""Rewards measured in a fresh pipeline are those that the rollout engine's evaluation images get."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from async_flowrl import evaluate as evaluating
from async_flowrl.config.schema import Config, LoraConfig, RewardTerm
from async_flowrl.data.prompts import load_prompts
from async_flowrl.export import save_lora
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rewards.registry import build_reward
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import EVALUATION, Ticket
from async_flowrl.types import Scores
from tests.support.tiny import adapted_policy, tiny_policy, token_ids

LORA = LoraConfig(rank=4, alpha=10.0)
PROMPTS = (
    {"prompt": "red red red red"},
    {"prompt": "blue blue blue blue", "negative_prompt": "red", "system_prompt": "Be bold."},
    {
        "prompt": "green",
        "prompt_token_ids": token_ids("red and blue", system="Be bold."),
        "negative_token_ids": token_ids("blue"),
        "system_prompt": "Be bold.",
    },
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with guidance, and prompts that bring their own system and negative prompts."""
    config = Config(lora=LORA)
    config.rollout.true_cfg_scale = 4.0
    config.reward.terms = {"color": RewardTerm(weight=2.0)}
    config.evaluate.images_per_prompt = 5
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    config.data.train = str(prompts)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    save_lora(tmp_path / "lora", adapted_policy(config=LORA).transformer, alpha=LORA.alpha)
    return tmp_path


def engine_mean(config: Config, policy: QwenImagePolicy) -> float:
    """The mean weighted reward of the rollout engine's own evaluation images."""
    prompts = load_prompts(config.data, split="evaluation", needs_target=False)
    assert prompts[1].system is not None and prompts[1].negative is not None
    recipe, engine = RequestBuilder(config, prompts, prompts), DiffusersEngine(policy)
    (term,) = build_reward(config.reward).terms
    values: list[float] = []
    for group, prompt in enumerate(prompts):
        ticket = Ticket(EVALUATION, ordinal=group, step=0, group=group, slice_index=0, version=0)
        values.extend(term.reward(engine.generate(recipe.request(ticket)).images, prompt))  # type: ignore[arg-type]
    return term.weight * float(np.mean(values))


def test_a_fresh_pipeline_scores_what_the_engine_scores(run: Path) -> None:
    assert evaluating.main([str(run), "--out", str(run / "found.json")]) == 0
    found = json.loads((run / "found.json").read_text())
    config = evaluating.read_config(run / "config.yaml")
    assert found["before"]["reward"] == pytest.approx(engine_mean(config, tiny_policy()), abs=2e-4)
    assert found["after"]["reward"] == pytest.approx(engine_mean(config, adapted_policy(config=LORA)), abs=2e-4)
    assert abs(found["after"]["reward"] - found["before"]["reward"]) > 0.005
    assert found["after"]["reward"] == pytest.approx(2 * found["after"]["color"])


def test_another_seed_gives_other_images(run: Path) -> None:
    for seed in ("1", "1", "2"):
        assert evaluating.main([str(run), "--seed", seed, "--images", "2", "--out", str(run / f"{seed}.json")]) == 0
    one, two = (json.loads((run / f"{seed}.json").read_text()) for seed in ("1", "2"))
    assert one["before"] != two["before"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert evaluating.main([str(tmp_path)]) == 2
    assert "config.yaml is not the configuration of a run" in caplog.text
    (tmp_path / "config.yaml").write_text("rolout: {resolution: 32}\n")
    assert evaluating.main([str(tmp_path)]) == 2
    assert "rolout" in caplog.messages[-1]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_a_failing_reward_is_one_sentence_or_skipped_as_the_run_would(
    on_error: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = tmp_path / "down.txt"
    down.write_text("blue")
    monkeypatch.setenv("TEST_JUDGE_DOWN", str(down))
    config = OmegaConf.load(run / "config.yaml")
    config.reward.on_error = on_error
    config.reward.terms = {"judge": {"name": "tests.integration.judge:judge"}}
    OmegaConf.save(config, run / "config.yaml")
    code = evaluating.main([str(run), "--images", "1", "--out", str(tmp_path / "out.json")])
    if on_error == "fail":
        assert code == 2 and "prompt 1 has no score: reward 'judge' failed" in caplog.text
    else:
        assert code == 0 and "prompt 1 is skipped: reward" in caplog.text
        assert set(json.loads((tmp_path / "out.json").read_text())) == {"before", "after"}


def test_before_and_after_are_means_over_the_same_prompts(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prompt that is skipped once is left out twice."""
    lists = iter([{0: 1.0, 1: 5.0, 2: 3.0}, {0: 2.0, 2: 4.0}, {1: 5.0}, {0: 2.0}])

    async def scored(*_: object) -> dict[int, Scores]:
        return {prompt: Scores((total,), {"color": (total,)}) for prompt, total in next(lists).items()}

    monkeypatch.setattr(evaluating, "_score", scored)
    config = evaluating.read_config(run / "config.yaml")
    found = evaluating.evaluate(config, run / "lora")
    assert (found["before"]["reward"], found["after"]["reward"]) == (2.0, 3.0)
    assert "means over 2 of 3 prompts" in caplog.text
    with pytest.raises(ValueError, match="none of 3 prompts could be scored"):
        evaluating.evaluate(config, run / "lora")
