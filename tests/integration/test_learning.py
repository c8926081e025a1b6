"""Tests that training raises the reward, and that it does not if the reward or the advantages are falsified."""

from dataclasses import replace
from pathlib import Path

import pytest

from async_flowrl.cli.before_after import evaluate
from async_flowrl.cli.evaluate import parser
from async_flowrl.cli.evaluation_job import job_of
from async_flowrl.config.compose import read_config
from async_flowrl.config.schema import RewardTerm
from tests.integration.runs import WHOLE, Run, train

EXPERIMENT = (
    *WHOLE,
    "total_steps=100",
    "group_size=16",
    "trainer.micro_batch_size=16",
    "evaluate.images_per_prompt=24",
)
"""The shipped experiment, without the shortening that the other tests share."""
COLOR = {"color": RewardTerm()}
SWAPPED = "tests.integration.swapped_color:SwappedColor"


def learn(folder: Path, *overrides: str) -> Run:
    return train(folder, "one_step_off", "experiment=two_prompts", *EXPERIMENT, *overrides)


def rise(run: Run, terms: dict[str, RewardTerm] | None = None) -> float:
    """How much more the exported LoRA earns in a fresh pipeline than the base model, on noise never trained on."""
    config = read_config(run.root / "config.yaml")
    assert config.evaluate.seed != config.seed
    terms = terms or COLOR
    job = replace(job_of(parser().parse_args([str(run.root)])), kinds=dict.fromkeys(terms, "trained"))
    job.config.reward.terms = terms
    return float(evaluate(job).rows["reward"]["difference"]["mean"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_prompts_are_learned(tmp_path: Path) -> None:
    run = learn(tmp_path, "evaluate.before_training=true")
    assert rise(run) >= 0.15
    before, after = run.metrics[0]["evaluation_before/color/mean"], run.metrics[-1]["evaluation/color/mean"]
    assert after - before == pytest.approx(rise(run), abs=0.002)
    assert run.summary["reward_last"] - run.summary["reward_first"] >= 0.15
    assert run.summary["staleness_max"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_learned_from_permuted_advantages(tmp_path: Path) -> None:
    assert rise(learn(tmp_path, "seed=1", "algorithm.permute_advantages=true")) < 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_negated_reward_falls(tmp_path: Path) -> None:
    assert rise(learn(tmp_path, "algorithm.negate_reward=true")) <= -0.15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_swapped_prompts_swap_the_effect(tmp_path: Path) -> None:
    run = learn(tmp_path, f"reward.terms.color.name={SWAPPED}")
    assert rise(run, {"color": RewardTerm(name=SWAPPED)}) >= 0.15
    assert rise(run) <= -0.15


def test_deliveries_frozen_at_version_0_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "one_step_off", "total_steps=100", "disturb.freeze_publish=true", code=1)
    told = capsys.readouterr().err
    *lost, end = told.splitlines()
    assert "CorruptedVersion" in end and "version 1 of stream policy arrived with wrong bytes in" in end
    assert [line.split()[:2] for line in lost] == [["WARNING:", "rollout-0"], ["WARNING:", "rollout-0.1"]]
    stale = Run(tmp_path)
    assert {event["step"] for event in stale.tickets("TRAINED")} <= {0, 1}
    assert {event["version"] for event in stale.tickets("RUNNING")} == {0}
