"""Measures all variants under one load, alternating with the bare loops, for `python -m async_flowrl.benchmark`.

A bare loop is plain generation or training without any framework (bare.py).
"""

import argparse
import logging
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from async_flowrl.benchmark import loops, measure
from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.targets import Load, Results, Round
from async_flowrl.benchmark.variants import Machine, Variant, chosen
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan.arguments import count, factor, pair, seconds

logger = logging.getLogger(__name__)

PROGRAM = ("python", "-m", "async_flowrl.benchmark")
DEFAULT_LOAD = ("prompts_per_step=10", "rollout.num_inference_steps=9")
"""With the tiny model: about one second each of generation and training per step, ten tickets per worker."""


def parser(prog: str = " ".join(PROGRAM)) -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(prog=prog, description="Every mode, same devices.")
    option = command_line.add_argument
    option("overrides", nargs="*", metavar="key=value", help="configuration of all variants")
    option("--out", type=Path, default=Path("outputs/benchmark"), help="benchmark.{json,md,png} go here")
    option("--steps", type=count, default=9, help="training steps per run; the first two are warm-up")
    option("--repeats", type=count, default=2)
    option("--loop-seconds", type=seconds, default=8.0, help="how long each bare loop is measured")
    option("--no-contention", action="store_true", help="don't measure the bare loops alone, only side by side")
    option("--devices", type=count, help="default: all GPUs, or two CPU cores")
    option("--split", type=pair, metavar="R:T", help="rollout and trainer devices of the separate pools")
    option("--only", action="append", default=[], metavar="NAME", help="only this variant (and others given so)")
    option("--reward-latency", type=seconds, default=0.0, metavar="S", help="seconds per reward call")
    option("--reward-latency-share", type=seconds, default=0.0, metavar="X", help="the same in shares of max(G,T)")
    option("--reward-cv", type=seconds, default=0.0, help="spread of that latency (above 1: heavy tail)")
    option("--reward-workers", type=count)
    option("--slow-worker", type=factor, default=1.0, metavar="X", help="rollout worker 0 takes X times as long")
    option("--resolution", type=count, metavar="PIXELS")
    option("--trained-steps", type=count, metavar="N", help="trained denoising steps: a window drawn at random")
    return command_line


def load_overrides(given: argparse.Namespace, latency: float) -> list[str]:
    """Returns the overrides that all variants share; `latency` is the seconds of one reward call, 0 for none."""
    load = [f"total_steps={given.steps}", *DEFAULT_LOAD]
    if given.resolution:
        load.append(f"rollout.resolution={given.resolution}")
    if given.trained_steps:
        load += ["algorithm.window=random", f"algorithm.sde_window_size={given.trained_steps}"]
    if given.slow_worker > 1:
        load.append(f"debug.delays.slow_worker={given.slow_worker:g}")
    if latency:
        options = "reward.terms.latency.options"
        load += ["reward=color_and_latency", f"{options}.seconds={latency:.6g}", f"{options}.cv={given.reward_cv:g}"]
    if given.reward_workers:
        load.append(f"reward.num_workers={given.reward_workers}")
    return [*load, *given.overrides]


def compare(arguments: Sequence[str], directory: Path) -> Results:
    """Makes all repeats that a command line asks for; temporary files go to `directory`.

    Raises ValueError or ConfigError for wrong arguments, and RunFailed if a run fails.
    """
    given = parser().parse_intermixed_args(arguments)
    command = shlex.join([*PROGRAM, *arguments])
    machine = Machine.here(given.devices, given.split)
    config = composed(load_overrides(given, given.reward_latency), directory)
    runs = chosen(machine, given.only)
    description = machine_description()
    rounds: list[Round] = []
    load = Load(config.prompts_per_step * (config.group_size // config.images_per_ticket) / machine.rollout)
    load = replace(load, latency=given.reward_latency, slow_worker=given.slow_worker)
    for repeat in range(given.repeats):
        logger.info("repeat %d of %d: bare loops", repeat + 1, given.repeats)
        bare = loops.measure(config, seconds=given.loop_seconds, alone=not given.no_contention)
        if given.reward_latency_share and not rounds:
            bound = Results(machine, [], load, command).bound(bare)
            load = replace(load, latency=round(given.reward_latency_share * bound, 3))
        overrides = load_overrides(given, load.latency)
        config = composed(overrides, directory)
        measured = {v.name: one(v, overrides, directory, repeat) for v in order(runs, repeat)}
        rounds.append(Round(bare, {v.name: measured[v.name] for v in runs}))
    load = replace(load, reward_seconds=config.prompts_per_step * load.latency / config.reward.num_workers)
    return Results(machine, rounds, load, command, overrides, description)


def composed(overrides: Sequence[str], directory: Path) -> Config:
    """Composes the configuration of mode one_step_off with these overrides, to read the load from it."""
    config: Config = compose_config("one_step_off", [*overrides, f"output_dir={directory}/none"])
    return config


def order(variants: Sequence[Variant], repeat: int) -> Sequence[Variant]:
    """Returns the variants forwards in even and backwards in odd repeats, so that a slowing machine favours none."""
    return list(reversed(variants)) if repeat % 2 else variants


def one(variant: Variant, overrides: Sequence[str], directory: Path, repeat: int) -> measure.Measured:
    """Makes one run of a variant in a temporary run directory and returns its measurements."""
    logger.info("  %s", variant.name)
    name = f"{variant.name} (repeat {repeat + 1})"
    with tempfile.TemporaryDirectory(dir=directory) as place:
        return measure.run(variant, name, overrides, Path(place) / "run")
