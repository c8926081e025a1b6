"""Tests of the league of algorithms on glyphs: its entries, choice of learning rates, tables, picture and page."""

from dataclasses import replace
from pathlib import Path

import pytest

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.compose import compose_config
from async_flowrl.main import command_line
from examples.glyphs.compare import ROOT, complete, overrides
from examples.glyphs.league import RATES, SEEDS, UPDATES, play, show, variant
from examples.glyphs.league_page import (
    NOTHING,
    SEEDS_EACH,
    draw,
    goals_table,
    pace_of,
    page,
    scores_table,
    tuning_table,
)
from examples.glyphs.league_results import best_rate, load_league, named
from examples.glyphs.result import Result, load_all

PICTURE = "images/glyphs_league.png"
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


def test_tables_say_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    save(tmp_path)
    league = load_league(tmp_path, ["dpo", "flow_grpo"], RATES)
    scores = scores_table(league).splitlines()
    assert scores[3].startswith("| `flow_grpo` | 0.0015 | 11, 12, 13 | 0.800 | 0.800 |")
    assert scores[3].endswith("| 0.700, 0.800, 0.900 | 0.400 |")
    assert scores[4].startswith("| `dpo` | not tuned | not run |")
    goals = goals_table(league).splitlines()
    assert goals[2] == "| `flow_grpo` | 960, 960, 960 | 1920, 1920, 1920 | never, 1920, 1920 | not measured |  |  |  |"
    assert goals[3].startswith("| `dpo` | not run |")
    tuning = tuning_table(league).splitlines()
    assert tuning[2] == "| `dpo` | not run | not run | not run | not run |  |"
    assert tuning[3] == "| `flow_grpo` | 0.300 | 0.700 | 0.200 | 0.100 | 0.0015 |"
    assert len({line.count("|") for line in scores}) == 1 and len({line.count("|") for line in goals}) == 1


def test_seconds_are_those_of_a_quiet_run_or_none(tmp_path: Path) -> None:
    save(tmp_path)
    quiet = result("flow_grpo", 11, seconds=1.5)
    for load, said in ((1.0, "| 1.50 | 30 | 60 | 60 |"), (9.0, "| not measured |  |  |  |")):
        replace(quiet, load=load, final={}).save(tmp_path / "pace" / "flow_grpo_seed11.json")
        league = load_league(tmp_path, ["flow_grpo"], RATES)
        assert goals_table(league).splitlines()[2].endswith(said)
    assert pace_of(quiet) == pytest.approx(1.5)


def test_the_picture_is_drawn_with_and_without_seconds(tmp_path: Path) -> None:
    save(tmp_path)
    league = load_league(tmp_path, ["flow_grpo", "dpo"], RATES)
    timed = replace(league, pace={"flow_grpo": result("flow_grpo", 11)})
    for number, each in enumerate((league, timed)):
        draw(each, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_there_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "results")
    play("flow_grpo", list(SEEDS), None, tmp_path / "runs", tmp_path / "results")
    assert capsys.readouterr().out.count("already in") == len(RATES) + len(SEEDS) and not (tmp_path / "runs").exists()


def test_the_page_shows_the_kept_results() -> None:
    league = load_league(ROOT / "examples/glyphs/league_results", list(UPDATES), RATES)
    text = (ROOT / "examples/glyphs/league.md").read_text(encoding="utf-8")
    assert page(league, f"../../docs/{PICTURE}") in text, "run: python -m examples.glyphs.league --draw"
    drawn = any(league.judged.values())
    assert (ROOT / "docs" / PICTURE).is_file() is drawn and text.count(PICTURE) == drawn


def test_without_a_judged_run_the_page_says_so_and_shows_no_picture(tmp_path: Path) -> None:
    to, picture = tmp_path / "page.md", tmp_path / PICTURE
    to.write_text("<!-- league: begin -->\nold\n<!-- league: end -->\n", encoding="utf-8")
    show(load_league(tmp_path, list(UPDATES), RATES), picture, to)
    said = to.read_text(encoding="utf-8")
    assert NOTHING in said and "|" not in said and not picture.exists()
    save(tmp_path, seeds=())
    show(load_league(tmp_path, list(UPDATES), RATES), picture, to)
    said = to.read_text(encoding="utf-8")
    assert NOTHING in said and "### Tuning" in said and not picture.exists()
    save(tmp_path)
    show(load_league(tmp_path, list(UPDATES), RATES), picture, to)
    said = to.read_text(encoding="utf-8")
    assert NOTHING not in said and f"]({PICTURE})" in said and picture.is_file()
    assert "**The league is not finished.** Not yet judged with 3 seeds: `diffusion_nft_half`, `flow_grpo_b" in said
    whole = load_league(tmp_path, ["flow_grpo"], RATES)
    assert len(SEEDS) == SEEDS_EACH and "not finished" not in page(whole, PICTURE)


@pytest.mark.slow
def test_an_entry_trains_and_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    entry = variant("grpo_guard", 0.0015, "evaluate.images_per_prompt=1")
    complete("mine", entry, 11, steps=2, runs=tmp_path / "runs", results=tmp_path / "results", copies=2)
    (found,) = load_all(tmp_path / "results")
    assert found.images == [48, 96] and [step for step, _ in found.evaluations] == [-1, 1]
    assert set(found.final) == set(FINAL) and all(0 <= value <= 1 for value in found.final.values())
