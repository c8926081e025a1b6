"""Tests of the comparisons of modes on glyphs: results, paired statistics, tables and pictures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_flowrl.config.compose import compose_config
from async_flowrl.main import command_line
from examples.glyphs.audit import open_model, trained_images
from examples.glyphs.compare import ROOT, VARIANTS, complete, overrides, sections
from examples.glyphs.flow import STEPS, generate, legibility
from examples.glyphs.result import Result, goal_ratios, interval, load_all, score_differences, time_ratios
from examples.glyphs.result_picture import COLOURS, FLOW_GRPO, draw, table
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


def test_results_are_read_back_as_they_were_saved_in_order(tmp_path: Path) -> None:
    mine = [result("one_step_off", 1), result("one_step_off", 0), result("sync", 0)]
    for each in mine:
        each.save(tmp_path / f"{each.variant}_seed{each.seed}.json")
    assert load_all(tmp_path) == [mine[1], mine[0], mine[2]]
    assert all(path.suffix == ".json" for path in tmp_path.iterdir())


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


def test_seconds_of_a_run_that_gave_way_do_not_count() -> None:
    found = [result("sync", 0), result("sync", 1), result("fully_async", 0, niceness=19), result("fully_async", 1)]
    assert len(score_differences(found, "fully_async", "sync")) == 2
    assert len(time_ratios(found, "fully_async", "sync")) == 1
    busy = [replace(each, load=3.1) for each in found]
    assert time_ratios(busy, "fully_async", "sync") == [] and len(score_differences(busy, "fully_async", "sync")) == 2


def test_the_interval_is_students() -> None:
    assert interval([0.1]) is None
    assert interval([0.1, 0.2, 0.3]) == pytest.approx((0.2 - 2.920 * 0.1 / 3**0.5, 0.2 + 2.920 * 0.1 / 3**0.5))


def test_table_and_picture_show_every_run(tmp_path: Path) -> None:
    found = [result("sync", 0, 0.5), result("sync", 1, 0.6), result("one_step_off", 0, 0.8), result("mine", 0)]
    lines = table(found).splitlines()
    assert sum(line.startswith("| sync") for line in lines) == 2 and any(line.startswith("| mine") for line in lines)
    assert lines[-5] == "OCR of one_step_off less that of sync, by seed: +0.300"
    assert lines[-3] == "Seconds of one_step_off ÷ sync, by seed: 0.50; median 0.50"
    assert lines[-1] == "The same until the first evaluation of 0.8 or more: 0.50; median 0.50"
    draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_whose_result_is_there_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result("sync", 4).save(tmp_path / "results" / "sync_seed4.json")
    complete("sync", VARIANTS["sync"], 4, steps=None, runs=tmp_path / "runs", results=tmp_path / "results")
    assert "sync_seed4: already in" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


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


def test_the_fast_recipe_is_measured_against_the_other_at_the_same_seeds() -> None:
    found = [result("one_step_off", seed, 0.8, steps=6) for seed in (0, 14, 15)]
    found += [replace(result("fast", seed, 0.85, steps=6), seconds=[0.6] * 6) for seed in (14, 15)] + [
        result("grpo_sync", 14)
    ]
    parts = sections(found)
    assert [(each.variant, each.seed) for each in parts["fast"]] == [
        ("fast", 14),
        ("fast", 15),
        ("one_step_off", 14),
        ("one_step_off", 15),
    ]
    assert [each.seed for each in parts["compare"]] == [0, 14, 15] and len(parts["flow_grpo"]) == 1
    text = table(parts["fast"])
    assert "ocr of fast less that of one_step_off, by seed: +0.050, +0.050" in text and "variety of" not in text
    assert "Seconds of fast ÷ one_step_off until the first evaluation of 0.8 or more: 0.10, 0.10; median 0.10" in text
    assert "fast" not in table(parts["compare"])


def test_whole_weights_are_measured_against_the_lora_at_the_same_seeds() -> None:
    found = [result("one_step_off", seed, 0.8, steps=6) for seed in (0, 1, 2)]
    found += [result("full", seed, 0.85, steps=6) for seed in (1, 2)] + [result("full_permuted", 1, 0.2, steps=6)]
    parts = sections(found)
    assert [(each.variant, each.seed) for each in parts["full"]] == [
        *(("full", 1), ("full", 2), ("full_permuted", 1)),
        *(("one_step_off", 1), ("one_step_off", 2)),
    ]
    assert [each.variant for each in parts["compare"]] == ["one_step_off"] * 3
    assert "ocr of full less that of one_step_off, by seed: +0.050, +0.050" in table(parts["full"])
    assert "full" not in table(parts["compare"])


def test_a_whole_transformer_is_measured_and_leaves_the_pipeline_as_it_was(tmp_path: Path) -> None:
    pipeline = open_model()
    before = generate(pipeline, TEST[:1], 1, steps=2)
    changed = type(pipeline.transformer).from_pretrained(WEIGHTS / "transformer")
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(0.9)
    changed.save_pretrained(tmp_path / "transformer")
    images = trained_images(pipeline, tmp_path / "transformer", 1, steps=2)
    assert not np.array_equal(images[:1], before)
    assert np.array_equal(generate(pipeline, TEST[:1], 1, steps=2), before)


@pytest.mark.slow
def test_the_shipped_model_is_small_and_writes_badly() -> None:
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) < 10_000_000
    score = legibility(generate(open_model(), TEST, 2, steps=STEPS), TEST)
    assert 0.2 < score < 0.6


def test_the_kept_results_are_of_the_shipped_recipe(tmp_path: Path) -> None:
    kept = load_all(ROOT / "examples/glyphs/results")
    page = (ROOT / "examples/glyphs/measured.md").read_text(encoding="utf-8")
    for experiment in ("glyphs", "glyphs_flow_grpo", "glyphs_fast", "glyphs_full"):
        given = [f"experiment={experiment}", "model.path=tiny", f"output_dir={tmp_path / 'run'}"]
        config = compose_config(overrides=given)
        mine = [result for result in kept if VARIANTS[result.variant].experiment == experiment]
        images = config.total_steps * config.prompts_per_step * config.group_size
        assert all(result.images[-1] == images for result in mine)
        assert all(result.evaluations[-1][0] == config.total_steps - 1 for result in mine)
    shown = {name: results for name, results in sections(kept).items() if results}
    assert set(shown) >= {"compare", "flow_grpo"}
    assert all(table(each) in page for each in shown.values()), "run: python -m examples.glyphs.compare --draw"
