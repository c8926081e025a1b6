"""Tests of the league of algorithms on glyphs: its entries, choice of learning rates, tables, picture and page."""

from dataclasses import replace
from pathlib import Path

import pytest

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.compose import compose_config
from async_flowrl.main import command_line
from examples.glyphs.compare import ROOT, complete, overrides
from examples.glyphs.league import RATES, SEEDS, UPDATES, variant
from examples.glyphs.league_results import best_rate, load_league, named
from examples.glyphs.result import Result, load_all

FINAL = ("ocr", "other_reader", "wrong_word", "templates", "sharpness", "variety", "contrast")


def result(name: str, seed: int, *, last: float = 0.5, seconds: float = 2.0) -> Result:
    steps = range(1, 41)
    return Result(
        variant=name,
        seed=seed,
        images=[48.0 * step for step in steps],
        seconds=[100 + seconds * step for step in steps],
        reward=[0.1] * 20 + [last] * 20,
        evaluations=[(-1, 0.4), (19, 0.61), (39, last)],
        final=dict.fromkeys(FINAL, last),
        load=1.0,
        niceness=0,
        cores=2,
    )


def save(results: Path, *, rates: tuple[float, ...] = RATES, seeds: tuple[int, ...] = SEEDS) -> None:
    """Results of flow_grpo: best at the second rate."""
    for rate, last in zip(rates, (0.3, 0.7, 0.2, 0.1), strict=False):
        name = named("flow_grpo", rate)
        replace(result(name, 0, last=last), final={}).save(results / "tuning" / f"{name}_seed0.json")
    for number, seed in enumerate(seeds):
        name = named("flow_grpo", 0.0015)
        result(name, seed, last=(0.7, 0.8, 0.9)[number]).save(results / "judged" / f"{name}_seed{seed}.json")


def test_every_algorithm_of_the_project_takes_part() -> None:
    files = {path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml")}
    assert set(UPDATES) == files - {"flow_grpo_unclipped"}, "it is flow_grpo with another clip"


@pytest.mark.parametrize("algorithm", UPDATES)
def test_every_entry_differs_in_its_algorithm_alone(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    given, _ = command_line(overrides(variant(algorithm, 0.004), 11, tmp_path / "run", steps=None))
    config = compose_config(given.config_name, given.overrides)
    build_algorithm(config)
    assert config.trainer.learning_rate == 0.004 and config.seed == 11
    shared = config.total_steps, config.prompts_per_step, config.group_size, config.rollout.num_inference_steps
    assert shared == (120, 4, 12, 8)


def test_a_learning_rate_is_chosen_once_every_one_was_tried(tmp_path: Path) -> None:
    save(tmp_path, rates=RATES[:2])
    early = load_league(tmp_path, ["flow_grpo"], RATES)
    assert early.chosen("flow_grpo") is None and early.judged["flow_grpo"] == []
    save(tmp_path)
    late = load_league(tmp_path, ["flow_grpo"], RATES)
    assert late.chosen("flow_grpo") == 0.0015 and [each.seed for each in late.judged["flow_grpo"]] == [11, 12, 13]
    assert best_rate({0.004: result("a", 0), 0.0015: result("a", 0)}) == 0.0015


@pytest.mark.slow
def test_an_entry_trains_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    entry = variant("grpo_guard", 0.0015, "evaluate.images_per_prompt=1")
    complete("mine", entry, 11, steps=2, runs=tmp_path / "runs", results=tmp_path / "results", copies=2)
    (found,) = load_all(tmp_path / "results")
    assert found.images == [48, 96] and [step for step, _ in found.evaluations] == [-1, 1]
    assert set(found.final) == set(FINAL) and all(0 <= value <= 1 for value in found.final.values())
