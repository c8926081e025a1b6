"""Comparison of glyphs runs in several modes and seeds: trains them and draws OCR scores against images and seconds.

python -m examples.glyphs.compare                                    # every run without a result, then the pictures
python -m examples.glyphs.compare --variants one_step_off --seeds 0  # one run
python -m examples.glyphs.compare --draw                             # the pictures and tables alone, no training

Scores after training are on the held-out words, which no training has seen. A finished run writes one JSON file
(`Result`) into --results and is skipped afterwards. An interrupted run resumes from its last checkpoint in --runs.
Other work on the machine changes the seconds of a run, not its scores; therefore only the seconds of runs without
`nice` on a quiet machine are used (`Result.timed`).
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.markdown_tables import between_markers
from examples.glyphs.audit import open_model, scores, trained_images
from examples.glyphs.flow import STEPS
from examples.glyphs.learning_curves import read
from examples.glyphs.result_picture import AGAINST, FAST, FLOW_GRPO, FULL, LOOKS, QUANTIZED, draw, draw_frontier, table
from examples.glyphs.run_result import Result, load_all

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (0, 1, 2, 3, 4)
JUDGED_FAST = (50, 51, 52, 53, 54)
"""Test seeds of `fast`, with which nothing was chosen: `--variants one_step_off fast --seeds 50 51 52 53 54`."""
JUDGED_QUANTIZED = (20, 21, 22, 23, 24)
"""Test seeds of a base in 8 and 4 bits, with which nothing else was run or chosen: `--variants int8 nf4`."""
JUDGED_LOOKS = (30, 31, 32, 33, 34)
"""Test seeds of `vivid` and `direct_align`, with which nothing was chosen: `--variants vivid direct_align`."""
COPIES = 64
"""Images per held-out word after training: 1,024 images, whose mean score has a standard error of 0.011."""


@dataclass(frozen=True)
class Variant:
    """Configuration `--config-name <mode> experiment=<experiment>` with `overrides`, and the seeds to run it with."""

    mode: str
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = SEEDS
    experiment: str = "glyphs"
    sampling_steps: int = STEPS
    """Denoising steps of the images that are measured after training."""


def flow_grpo(mode: str, *overrides: str, seeds: tuple[int, ...] = (8, 9, 10)) -> Variant:
    """Returns a variant trained with Flow-GRPO, on seeds with which no setting was chosen.

    All its workers share one process, because these runs are compared by scores and not by seconds.
    """
    return Variant(mode, ("runtime.backend=local", *overrides), seeds, "glyphs_flow_grpo")


VARIANTS = {
    "one_step_off": Variant("one_step_off"),
    "sync": Variant("sync"),
    "sync_all_cores": Variant("sync", ("rollout.threads=2", "trainer.threads=2"), seeds=(0,)),
    "fully_async": Variant("fully_async", ("max_staleness=3",)),
    "permuted": Variant("one_step_off", ("algorithm.permute_advantages=true",), seeds=(0,)),
    "full": Variant("one_step_off", seeds=(1, 2), experiment="glyphs_full"),
    "full_permuted": Variant("one_step_off", ("algorithm.permute_advantages=true",), (1,), "glyphs_full"),
    "fast": Variant("one_step_off", seeds=JUDGED_FAST, experiment="glyphs_fast", sampling_steps=6),
    "int8": Variant("one_step_off", ("model.quantize=int8",), JUDGED_QUANTIZED),
    "nf4": Variant("one_step_off", ("model.quantize=nf4",), JUDGED_QUANTIZED),
    "vivid": Variant("one_step_off", ("runtime.backend=local",), JUDGED_LOOKS, experiment="glyphs_vivid"),
    "direct_align": Variant(
        "one_step_off", ("runtime.backend=local",), JUDGED_LOOKS[:3], experiment="glyphs_direct_align"
    ),
    "grpo_sync": flow_grpo("sync"),
    "grpo_one_step_off": flow_grpo("one_step_off"),
    "grpo_fully_async": flow_grpo("fully_async", "max_staleness=3"),
    "grpo_two_updates": flow_grpo("sync", "trainer.updates_per_batch=2", seeds=(8,)),
    "grpo_permuted": flow_grpo("sync", "algorithm.permute_advantages=true", seeds=(8,)),
}
"""Name to variant. `sync_all_cores` gives generation and training two threads each. With one thread each, `sync` leaves
one of two cores idle, because its two phases take turns. `permuted` is a control whose advantages are shuffled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: each variant's own")
    parser.add_argument("--steps", type=int, help="total_steps; default: the experiment's")
    parser.add_argument("--runs", type=Path, default=Path("outputs/glyphs_compare"), help="run directories")
    parser.add_argument("--results", type=Path, default=ROOT / "examples/glyphs/results")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/images", help="folder of the pictures")
    parser.add_argument("--page", type=Path, default=ROOT / "examples/glyphs/measured.md", help="gets the tables")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.draw:
        asked = [(name, arguments.seeds or VARIANTS[name].seeds) for name in arguments.variants]
        for seed in sorted({seed for _, seeds in asked for seed in seeds}):
            for variant in (name for name, seeds in asked if seed in seeds):
                complete(
                    variant,
                    VARIANTS[variant],
                    seed,
                    steps=arguments.steps,
                    runs=arguments.runs,
                    results=arguments.results,
                )
    found = load_all(arguments.results)
    if not found:
        raise SystemExit(f"compare: {arguments.results} has no results yet")
    for name, results in sections(found).items():
        show(results, name, arguments)
    draw_frontier([r for r in found if not r.variant.endswith("permuted")], arguments.pictures / "glyphs_frontier.png")


def sections(found: Sequence[Result]) -> dict[str, list[Result]]:
    """Splits the results into the sections of the page; a key is the name of the section's markers.

    `fast` and `full` (whole weights) also hold the runs of the recipe they are compared with, for the same seeds. Those
    of `fast` are in no other section; `quantized` and `looks` have all others.
    """
    parts = {FLOW_GRPO: "flow_grpo", FAST: FAST, FULL: FULL, **dict.fromkeys(QUANTIZED, "quantized")}
    parts |= dict.fromkeys(LOOKS, "looks")
    grouped: dict[str, list[Result]] = {"compare": [], **{name: [] for name in parts.values()}}
    for result in found:
        section = parts.get(result.variant, parts.get(result.variant.split("_")[0], "compare"))
        paired = result.variant == AGAINST and result.seed in JUDGED_FAST
        grouped[FAST if paired else section].append(result)
    seeds = {result.seed for result in grouped[FULL]}
    grouped[FULL] += [r for r in grouped["compare"] if r.variant == AGAINST and r.seed in seeds]
    for name in ("quantized", "looks"):
        if grouped[name]:
            grouped[name] += [r for r in grouped["compare"] if r.variant == AGAINST]
    return grouped


def show(results: Sequence[Result], name: str, arguments: argparse.Namespace) -> None:
    """Draws the runs into glyphs_<name>.png and writes their table between the page's markers `name`.

    Does nothing without results. Raises ValueError if the page has no such markers.
    """
    if not results:
        return
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    draw(results, arguments.pictures / f"glyphs_{name}.png")
    page = arguments.page.read_text(encoding="utf-8")
    arguments.page.write_text(between_markers(page, name, table(results)), encoding="utf-8")
    print(table(results))


def complete(
    name: str, variant: Variant, seed: int, *, steps: int | None, runs: Path, results: Path, copies: int = COPIES
) -> None:
    """Trains and measures one run and writes its `Result` into `results`; does nothing if it is there already.

    `steps` is `total_steps`, None means the experiment's own. `copies` images per held-out word are measured after
    training; 0 means none. Raises CalledProcessError if the training fails.
    """
    run = f"{name}_seed{seed}"
    target = results / f"{run}.json"
    if target.is_file():
        print(f"{run}: already in {results}", flush=True)
        return
    train(variant, seed, runs / run, steps=steps)
    result = collect(name, seed, runs / run, copies, variant.sampling_steps)
    result.save(target)
    said = f"held-out OCR {result.final['ocr']:.3f} after" if result.final else "trained on"
    print(f"{run}: {said} {result.images[-1]:.0f} images", flush=True)


def train(variant: Variant, seed: int, folder: Path, *, steps: int | None) -> None:
    """Runs `python -m async_flowrl.main`, resuming from the last checkpoint in `folder` if there is one.

    Raises CalledProcessError if the training fails.
    """
    command = [sys.executable, "-m", "async_flowrl.main", *overrides(variant, seed, folder, steps=steps)]
    subprocess.run(command, cwd=ROOT, check=True)


def overrides(variant: Variant, seed: int, folder: Path, *, steps: int | None) -> list[str]:
    """Returns the arguments of `python -m async_flowrl.main`."""
    given = [f"name={folder.name}", f"output_dir={folder.resolve()}", f"seed={seed}", "resume=auto"]
    length = [] if steps is None else [f"total_steps={steps}"]
    return ["--config-name", variant.mode, f"experiment={variant.experiment}", *given, *length, *variant.overrides]


def collect(name: str, seed: int, folder: Path, copies: int, sampling_steps: int = STEPS) -> Result:
    """Reads the curve of a finished run and measures what it trained on `copies` images per held-out word (0: none)."""
    curve = read(folder)
    trained = next(path for name in ("lora", "transformer") if (path := folder / name).is_dir())
    final = scores(trained_images(open_model(), trained, copies, sampling_steps)) if copies else {}
    return Result(
        variant=name,
        seed=seed,
        images=curve.images,
        seconds=[round(second, 2) for second in curve.seconds],
        reward=[round(value, 4) for value in curve.reward],
        evaluations=[(step, round(score, 4)) for step, score in curve.evaluations],
        final={key: round(value, 4) for key, value in final.items()},
        load=os.getloadavg()[1],
        niceness=os.nice(0),
        cores=os.cpu_count() or 1,
    )


if __name__ == "__main__":
    main()
