"""Tests of the comparisons of modes on glyphs: results, paired statistics, tables and pictures."""

from pathlib import Path

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.main import command_line
from examples.glyphs.audit import open_model
from examples.glyphs.compare import ROOT, VARIANTS, overrides
from examples.glyphs.flow import STEPS, generate, legibility
from examples.glyphs.result import Result, goal_ratios, score_differences, time_ratios
from examples.glyphs.result_picture import COLOURS, FLOW_GRPO
from examples.glyphs.words import TEST, WEIGHTS


def result(variant: str = "sync", seed: int = 0, ocr: float = 0.5, steps: int = 3, niceness: int = 0) -> Result:
    along = [float(step + 1) for step in range(steps)]
    return Result(
        variant=variant,
        seed=seed,
        images=[48 * each for each in along],
        seconds=[(2.0 if variant == "sync" else 1.0) * each for each in along],
        reward=[0.25 * each for each in along],
        evaluations=[(-1, 0.4), (0, 0.55), (steps - 1, 0.9)],
        final={"ocr": ocr, "other_reader": ocr, "wrong_word": 0.1, "templates": 0.6, "sharpness": 0.08},
        load=1.5,
        niceness=niceness,
        cores=2,
    )


def test_time_to_a_score_is_that_of_the_first_evaluation_above_it() -> None:
    assert result().seconds_to(0.4) == 0.0
    assert result().seconds_to(0.5) == 2.0
    assert result().seconds_to(0.9) == 6.0
    assert result().seconds_to(0.91) is None


def test_differences_are_paired_by_seed_at_equal_images() -> None:
    found = [result("sync", 0, 0.5), result("sync", 1, 0.6), result("sync", 2, 0.7, steps=4)]
    found += [result("one_step_off", seed, 0.75) for seed in (0, 1, 2, 3)]
    assert score_differences(found, "one_step_off", "sync") == pytest.approx([0.25, 0.15])
    assert time_ratios(found, "one_step_off", "sync") == [0.5, 0.5]
    assert goal_ratios(found, "one_step_off", "sync", 0.9) == [0.5, 0.5]
    assert goal_ratios(found, "one_step_off", "sync", 0.95) == []
    assert score_differences(found, "permuted", "sync") == []


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_can_run_and_has_a_colour(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    given, _ = command_line(overrides(VARIANTS[name], 3, tmp_path / name, steps=7))
    config = compose_config(given.config_name, given.overrides)
    assert (config.mode, config.seed, config.total_steps, config.resume) == (VARIANTS[name].mode, 3, 7, "auto")
    assert config.output_dir == str(tmp_path / name)
    assert config.algorithm.permute_advantages is name.endswith("permuted")
    expected = "flow_grpo" if name.startswith(FLOW_GRPO) else "diffusion_nft"
    assert config.algorithm.name == expected and name.removeprefix(f"{FLOW_GRPO}_") in COLOURS


@pytest.mark.slow
def test_the_shipped_model_is_small_and_writes_badly() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) < 10_000_000
    score = legibility(generate(open_model(), TEST, 2, steps=STEPS), TEST)
    assert 0.2 < score < 0.6
