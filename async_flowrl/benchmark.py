"""python -m async_flowrl.benchmark [--out DIR] [key=value ...]: every mode on the same devices, and their bound.

Runs `sync` colocated (in its variants) and separate, `stream`, `one_step_off` and `fully_async` one after another,
several times over, beside the bare loops that say what generation and training take by themselves. Overrides shape the
load and apply to all, for example `rollout.resolution=64` or `algorithm.window=random algorithm.sde_window_size=3`.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.benchmarking import loops, measure
from async_flowrl.benchmarking.table import Results, Round, as_json, markdown, picture
from async_flowrl.benchmarking.variants import BASELINE, Machine, Variant, variants
from async_flowrl.check import ConfigError
from async_flowrl.compose import compose_overrides, typed
from async_flowrl.config import Config
from async_flowrl.plan import count, pair, seconds
from async_flowrl.recipe import ticket_size

logger = logging.getLogger(__name__)

DEFAULT_LOAD = ("prompts_per_step=10", "rollout.num_inference_steps=9")
"""On the tiny model: about a second each of generation and training per step, ten tickets per worker."""


def load_overrides(given: argparse.Namespace) -> list[str]:
    """The load that all variants share."""
    found = [f"total_steps={given.steps}", *DEFAULT_LOAD, *given.overrides]
    if given.reward_latency:
        options = "reward.terms.latency.options"
        found += ["reward=color_and_latency"]
        found += [f"{options}.seconds={given.reward_latency}", f"{options}.cv={given.reward_cv}"]
    if given.reward_workers:
        found += [f"reward.num_workers={given.reward_workers}"]
    return found


def benchmark(given: argparse.Namespace, directory: Path) -> Results:
    """All repeats, interleaved."""
    overrides = load_overrides(given)
    config: Config = typed(compose_overrides("one_step_off", [*overrides, f"output_dir={directory}/none"]))
    machine = Machine.here(given.devices, given.split)
    always = {BASELINE, "one_step_off"}
    chosen = [v for v in variants(machine, config) if not given.only or v.name in {*always, *given.only}]
    rounds = []
    for repeat in range(given.repeats):
        logger.info("repeat %d of %d: bare loops", repeat + 1, given.repeats)
        bare = loops.measure(config, seconds=given.loop_seconds)
        rounds.append(Round(bare, {v.name: one(v, overrides, directory, repeat) for v in order(chosen, repeat)}))
    tickets = config.prompts_per_step * (config.group_size // ticket_size(config)) / machine.rollout
    ordered = [Round(r.loops, {v.name: r.runs[v.name] for v in chosen}) for r in rounds]
    return Results(machine, ordered, tickets, given.reward_latency, overrides)


def order(chosen: Sequence[Variant], repeat: int) -> Sequence[Variant]:
    """Forth and back, so that a machine that gets slower (or a neighbour) is nobody's disadvantage."""
    return list(reversed(chosen)) if repeat % 2 else chosen


def one(variant: Variant, overrides: Sequence[str], directory: Path, repeat: int) -> measure.Measured:
    logger.info("  %s", variant.name)
    name = f"{variant.name} (repeat {repeat + 1})"
    place = directory / f"{repeat}-{variant.name.replace(' ', '-')}"
    return measure.run(variant, name, overrides, place)


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmark.json").write_text(json.dumps(as_json(results), indent=2) + "\n")
    (out / "benchmark.md").write_text(markdown(results))
    picture(results, out / "benchmark.png")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m async_flowrl.benchmark", description="Every mode, same devices.")
    found.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of all variants")
    found.add_argument("--out", type=Path, default=Path("outputs/benchmark"), help="benchmark.{json,md,png} go here")
    found.add_argument("--steps", type=count, default=9, help="training steps per run; the first two are warm-up")
    found.add_argument("--repeats", type=count, default=2)
    found.add_argument("--loop-seconds", type=seconds, default=8.0, help="how long each bare loop is measured")
    found.add_argument("--devices", type=count, help="default: all GPUs, or two CPU cores")
    found.add_argument("--split", type=pair, metavar="R:T", help="rollout and trainer devices of the separate pools")
    found.add_argument(
        "--only", action="append", metavar="NAME", help="only this one beside sync separate and one_step_off"
    )
    found.add_argument("--reward-latency", type=seconds, default=0.0, metavar="S", help="seconds per reward call")
    found.add_argument("--reward-cv", type=seconds, default=0.0, help="spread of that latency (above 1: heavy tail)")
    found.add_argument("--reward-workers", type=count)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with tempfile.TemporaryDirectory() as directory:
            results = benchmark(given, Path(directory))
    except (ConfigError, ValueError, measure.RunFailed) as error:
        sys.stderr.write(f"benchmark: {error}\n")
        return 2
    out = given.out.expanduser()
    write(results, out)
    sys.stdout.write(markdown(results) + f"\nwrote {out}/benchmark.json, benchmark.md and benchmark.png\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
