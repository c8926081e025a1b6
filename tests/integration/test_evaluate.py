"""Tests of `evaluate`: scores from a fresh pipeline equal those of the rollout engine's evaluation images."""

import json
import logging
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from PIL import Image

from async_flowrl.cli import before_after as measure
from async_flowrl.cli import generate as generating
from async_flowrl.cli.evaluate import main as evaluating
from async_flowrl.cli.evaluate import parser
from async_flowrl.cli.evaluation_job import job_of
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import read_config
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.data.load import load_data
from async_flowrl.policies import lora_file, lora_formats
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.trained_file import apply_lora
from async_flowrl.rewards.registry import build_reward
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import EVALUATION, Ticket
from tests.integration.exported import LORA, write_config
from tests.support.shared_models import SharedModels
from tests.support.tiny import RED, adapted_policy, save_lora, token_ids

IMAGES = 2
"""Of each prompt."""


@cache
def prompts_file() -> str:
    """Prompts one a line. The last brings token ids, for which a pipeline is loaded."""
    prompts = (
        {"prompt": "red red red red"},
        {"prompt": "blue blue blue blue", "negative_prompt": "red", "system_prompt": "Be bold."},
        {
            "prompt": "green",
            "prompt_token_ids": token_ids("red and blue", system="Be bold."),
            "negative_token_ids": token_ids("blue"),
            "system_prompt": "Be bold.",
        },
    )
    return "".join(json.dumps(prompt) + "\n" for prompt in prompts)


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with guidance, and prompts that bring their own system and negative prompts."""
    folder = tmp_path_factory.mktemp("trained")
    config = Config(lora=LORA)
    config.rollout.true_cfg_scale = 4.0
    config.reward.terms = {"color": RewardTerm(weight=2.0)}
    config.evaluate.images_per_prompt = IMAGES
    prompts = folder / "prompts.jsonl"
    prompts.write_text(prompts_file())
    config.data.train = str(prompts)
    write_config(folder, config)
    save_lora(folder / "lora", adapted_policy(config=LORA).transformer, alpha=LORA.alpha)
    return folder


@pytest.fixture
def run(evaluated_run: Path, tmp_path: Path) -> Path:
    """A copy of it, which the test may change."""
    shutil.copytree(evaluated_run, tmp_path, dirs_exist_ok=True)
    return tmp_path


def engine_scores(config: Config, policy: QwenImagePolicy) -> list[list[float]]:
    """The weighted rewards of the rollout engine's own evaluation images, by prompt."""
    prompts = load_data(config.data, needs_target=False).evaluation
    assert prompts[1].system is not None and prompts[1].negative is not None
    recipe, engine = RequestBuilder(config, prompts, prompts), DiffusersEngine(policy)
    (term,) = build_reward(config.reward).terms
    groups = []
    for group, prompt in enumerate(prompts):
        ticket = Ticket(EVALUATION, ordinal=group, step=0, group=group, slice_index=0, version=0)
        scores: Any = term.reward(engine.generate([recipe.request(ticket)])[0].images, prompt)  # type: ignore[arg-type]
        groups.append([term.weight * float(score) for score in scores])
    return groups


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


def test_a_fresh_pipeline_scores_what_the_engine_scores(
    run: Path, shared_models: SharedModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Image by image; and the statistics are those of prompts, not of images."""
    assert evaluating([str(run), "--out", str(tmp_path / "out")]) == 0
    config = read_config(run / "config.yaml")
    before, after = engine_scores(config, shared_models.tiny), engine_scores(config, adapted_policy(config=LORA))
    found = results(tmp_path / "out")
    row = found["rewards"]["reward"]
    for side, wanted in (("before", before), ("after", after)):
        assert [row["scores"][side][str(place)] for place in range(3)] == [
            pytest.approx(group, abs=2e-4) for group in wanted
        ]
    changes = np.array([np.subtract(b, a) for a, b in zip(before, after, strict=True)])
    assert row["difference"]["mean"] == pytest.approx(changes.mean(), abs=2e-4)
    assert row["difference"]["stderr"] == pytest.approx(changes.mean(axis=1).std(ddof=1) / 3**0.5, abs=1e-4)
    half = 4.302652729911275 * row["difference"]["stderr"]  # Student's t, 2 degrees of freedom, 97.5 %
    assert row["difference"]["high"] - row["difference"]["mean"] == pytest.approx(half)
    assert row["improved"] == (changes > 0).mean()
    assert abs(row["difference"]["mean"]) > 0.005
    assert row["after"]["mean"] == pytest.approx(2 * found["rewards"]["color"]["after"]["mean"])
    shown = capsys.readouterr().out
    assert "difference [95 %]" in shown and "3 prompts" in shown and f"{row['difference']['mean']:+.4g}" in shown
    sheet = np.asarray(Image.open(tmp_path / "out" / "before_after.png"))
    assert sheet.shape[1] == 2 * (IMAGES * 128 + (IMAGES - 1) * 4) + 4 * 4 and sheet.std() > 1


@pytest.mark.extended
def test_anothers_lora_with_other_prompts_and_rewards(tmp_path: Path, run: Path) -> None:
    """A file in kohya's names, which says nothing of itself: the same images as with the run's own LoRA."""
    source = lora_file.read(run / "lora")
    theirs = lora_formats.write(
        tmp_path / "far" / "from" / "theirs.safetensors", source, family="qwen_image", form="kohya"
    )
    prompts = tmp_path / "mine.txt"
    prompts.write_text("red red red red\nblue\n")
    common = ["--prompts", str(prompts), "--images", "2", "--num-inference-steps", "3", "--guidance", "1"]
    rewards = ["--reward", "color", "--reward", "tests.integration.brightness:brightness"]
    assert evaluating([str(theirs), "--base", "tiny", *common, *rewards, "--out", str(tmp_path / "theirs")]) == 0
    assert evaluating([str(run), *common, *rewards, "--out", str(tmp_path / "ours")]) == 0
    one, two = results(tmp_path / "theirs"), results(tmp_path / "ours")
    assert one["prompts"] == ["red red red red", "blue"] and one["num_inference_steps"] == 3
    assert set(one["rewards"]) == {"color", "brightness"} == set(two["rewards"])
    for name, row in one["rewards"].items():
        assert row["after"]["mean"] == pytest.approx(two["rewards"][name]["after"]["mean"], abs=1e-3)
        assert row["before"]["mean"] == pytest.approx(two["rewards"][name]["before"]["mean"], abs=1e-6)


@pytest.mark.parametrize(
    ("row", "options", "named"),
    [
        ({"prompt": "red", "resolution": 33}, (), r"^{file}:2: .*33, nearest: 32$"),
        ({"prompt": "red", "resolution": 33}, ("--resolution", "49"), r"^resolution .*49, nearest: 48$"),
        ({"prompt": "pale"}, (), r"^{file}:2: .*'pale'"),
        ({"prompt": "red"}, ("--prompts", "/nowhere.txt"), r"^--prompts=/nowhere\.txt does not exist"),
    ],
)
def test_a_prompt_that_cannot_be_made_or_scored_and_a_wrong_path_are_named(
    row: dict[str, Any], options: Sequence[str], named: str, run: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps(each) + "\n" for each in ({"prompt": "blue"}, row)))
    with pytest.raises((ValueError, OSError), match=named.format(file=prompts)):
        measure.evaluate(job_of(parser().parse_args([str(run), "--prompts", str(prompts), *options])))


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.extended
def test_a_failing_reward_is_one_sentence_or_skipped_and_a_missing_program_is_named_at_once(
    on_error: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = tmp_path / "down.txt"
    down.write_text("blue")
    monkeypatch.setenv("TEST_JUDGE_DOWN", str(down))
    config = OmegaConf.load(run / "config.yaml")
    config.reward.on_error, config.reward.backoff = on_error, 0.01
    config.reward.terms = {"judge": {"name": "tests.integration.judge:judge"}}
    OmegaConf.save(config, run / "config.yaml")
    code = evaluating([str(run), "--images", "1", "--out", str(tmp_path / "out")])
    if on_error == "fail":
        assert code == 2 and "jsonl:2: this prompt has no score: reward 'judge' failed" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    else:
        assert code == 0
        assert results(tmp_path / "out")["scored"] == 2
    config.evaluate.reward.terms = {"x": {"serve": {"command": "nosuch {port}"}}}
    OmegaConf.save(config, run / "config.yaml")
    with pytest.raises(ConfigError, match=r"^evaluate\.reward\.terms\.x\.serve\.command: .*'nosuch'"):
        job_of(parser().parse_args([str(run)]))


def test_before_and_after_are_compared_over_the_same_prompts(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that is skipped once is left out twice; a term that is trained against is better where it is less."""
    job = job_of(parser().parse_args([str(run)]))
    before = {0: (1.0, 2.0), 1: (5.0, 5.0), 2: (3.0, 3.0)}
    after = {0: (2.0, 1.0), 2: (4.0, 5.0)}
    row = measure.row("color", job, before, after)
    assert [row[side]["mean"] for side in ("before", "after", "difference")] == [2.25, 3.0, 0.75]
    assert row["improved"] == 0.75
    assert "color: means over 2 of 3 prompts" in caplog.text
    job.config.reward.terms = {"color": RewardTerm(weight=-1.0)}
    assert measure.row("color", job, before, after)["improved"] == 0.25


def test_generate_shows_before_and_after_with_the_runs_own_settings(
    trained: QwenImagePolicy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ran, lora = Config(), tmp_path / "lora"
    ran.rollout.num_inference_steps = 4
    save_lora(lora, trained.transformer, alpha=LORA.alpha)
    write_config(tmp_path, ran)
    out = tmp_path / "grid.png"
    command = ["--lora", str(lora), "--out", str(out), "--images", "2", "--seed", "5"]
    with caplog.at_level(logging.INFO):
        assert generating.main([*command, "--prompt", RED.text, "--prompt", "blue blue blue blue"]) == 0
    assert f"wrote {out}" in caplog.text

    config = generating.config_of(lora, None)
    how = config.model, generating.sampling_of(config)
    assert (how[1].num_inference_steps, how[1].resolution) == (4, 32)
    pipeline = generating.open_pipeline(*how, "cpu")
    before = generating.sample(pipeline, *how, RED.text, [5, 6])
    apply_lora(pipeline, lora)
    after = generating.sample(pipeline, *how, RED.text, [5, 6])
    assert np.abs(before.astype(int) - after).max() > 10
    sheet = np.asarray(Image.open(out))
    top, side = 2 * 22, 128
    right = 2 * side + 5 * 4
    for left, images in ((0, before), (right, after)):
        shown = sheet[top : top + side : 4, left : left + side : 4]
        assert np.array_equal(shown, images[0])
