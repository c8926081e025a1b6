"""Comparison of all algorithms on the same words with the same tuning budget: trains what is missing, writes the page.

python -m examples.glyphs.league                                  # every run without a result
python -m examples.glyphs.league --algorithms diffusion_nft_half dpo # these algorithms only
python -m examples.glyphs.league --pace                           # seconds per step, on a quiet machine
python -m examples.glyphs.league --draw                           # the page alone, no training

An algorithm is a file of configs/algorithm. Tuning is one whole run per learning rate of `RATES` with one seed. The
best rate is then judged, which means trained with three other seeds and measured on the held-out words. A finished run
writes one JSON file into --results and is skipped afterwards. An interrupted run resumes from its last checkpoint in
--runs.
"""

import argparse
import json
import os
from pathlib import Path

import torch

from benchmarks.markdown_tables import between_markers
from examples.glyphs.audit import open_model, scores
from examples.glyphs.compare import COPIES, ROOT, Variant, complete
from examples.glyphs.flow import generate
from examples.glyphs.league_page import draw, page
from examples.glyphs.league_results import League, best_rate, load_league, named
from examples.glyphs.words import TEST

RATES = (5e-4, 1.5e-3, 4e-3, 1e-2)
"""Learning rates that every algorithm is tuned over; each falls linearly to zero during a run."""
TUNING_SEED, SEEDS, PACE_SEED = 0, (11, 12, 13), 11
PACE_STEPS = 12
"""Training steps of the short run whose seconds are measured."""
STEPS = 8
"""Denoising steps per image, in training and in the final measurement."""
UPDATES = {
    "diffusion_nft_half": 1,
    "flow_grpo_bounded": 1,
    "flow_grpo": 2,
    "diffusion_nft": 1,
    "grpo_guard": 2,
    "mix_grpo": 2,
    "dance_grpo": 2,
    "flow_dppo": 2,
    "dpo": 1,
    "flow_grpo_fast": 2,
    "flow_cps": 2,
    "vgrpo": 1,
    "awm": 1,
    "dgpo": 1,
    "crd": 1,
}
"""Algorithm to optimizer steps per batch, in the order in which the algorithms are trained. The published
policy-gradient recipes take two, because their clips and masks have no effect before the second. The recipes found on
glyphs and the losses on final images take one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=UPDATES, default=list(UPDATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="judged seeds")
    parser.add_argument("--steps", type=int, help="total_steps; default: the experiment's")
    parser.add_argument("--runs", type=Path, default=Path("outputs/glyphs_league"), help="run directories")
    parser.add_argument("--results", type=Path, default=ROOT / "examples/glyphs/league_results")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/glyphs_league.png")
    parser.add_argument("--page", type=Path, default=ROOT / "examples/glyphs/league.md", help="gets the tables")
    parser.add_argument("--pace", action="store_true", help="measure seconds per step; train nothing else")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.draw:
        reference(arguments.results / "reference.json")
        for algorithm in arguments.algorithms:
            if arguments.pace:
                measure_pace(algorithm, arguments.runs, arguments.results)
            else:
                play(algorithm, arguments.seeds, arguments.steps, arguments.runs, arguments.results)
    show(load_league(arguments.results, list(UPDATES), RATES), arguments.picture, arguments.page)


def play(algorithm: str, seeds: list[int], steps: int | None, runs: Path, results: Path) -> None:
    """Tunes one algorithm, then trains and measures it with the best learning rate for every seed in `seeds`.

    `steps` is `total_steps` of all these runs; None means the experiment's own.
    """
    for rate in RATES:
        without = ("evaluate.before_training=false", "evaluate.every=0")
        entry = variant(algorithm, rate, *without)
        complete(
            named(algorithm, rate), entry, TUNING_SEED, steps=steps, runs=runs, results=results / "tuning", copies=0
        )
    rate = best_rate(load_league(results, [algorithm], RATES).tuning[algorithm])
    for seed in seeds:
        entry = variant(algorithm, rate)
        complete(named(algorithm, rate), entry, seed, steps=steps, runs=runs, results=results / "judged")


def measure_pace(algorithm: str, runs: Path, results: Path) -> None:
    """Makes a short run to time its steps, with the middle learning rate; the rate does not change the seconds."""
    entry = variant(algorithm, RATES[1], "evaluate.before_training=false", "evaluate.every=0")
    complete(algorithm, entry, PACE_SEED, steps=PACE_STEPS, runs=runs, results=results / "pace", copies=0)


def variant(algorithm: str, rate: float, *more: str) -> Variant:
    """Returns the configuration of a run: mode one_step_off (staleness 1), all workers in one process."""
    given = (
        f"algorithm={algorithm}",
        f"trainer.updates_per_batch={UPDATES[algorithm]}",
        f"trainer.learning_rate={rate}",
    )
    return Variant(
        "one_step_off", ("runtime.backend=local", "hand_over=batch", *given, *more), SEEDS, "glyphs_league", STEPS
    )


def reference(target: Path) -> None:
    """Measures the model before training like the judged runs and writes the scores to `target`, unless it exists."""
    if target.is_file():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    base = scores(generate(open_model(), TEST, COPIES, steps=STEPS, guidance=1.0))
    target.write_text(json.dumps({key: round(value, 4) for key, value in base.items()}) + "\n", encoding="utf-8")


def show(league: League, picture: Path, to: Path) -> None:
    """Draws the judged runs, if there are any, writes all tables between the page's markers, and prints them."""
    if any(league.judged.values()):
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(league, picture)
    text = page(league, Path(os.path.relpath(picture, to.parent)).as_posix())
    to.write_text(between_markers(to.read_text(encoding="utf-8"), "league", text), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
