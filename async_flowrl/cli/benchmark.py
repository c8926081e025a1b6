"""async-flowrl benchmark [--out DIR] [key=value ...]: all modes side by side, on the same devices and your load.

The variants run one after another and repeatedly. A run's bound is the shortest step that any schedule could make of
what its workers took for the work.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from async_flowrl.cli.options import count, folder, pair
from async_flowrl.config.compose import compose_config
from async_flowrl.config.error_text import unknown_name
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.observability.terminal import refuse, say
from separation.text_table import markdown_table

BASELINE = "sync separate"
ONE_POOL = "placement=shared"
# Overrides that switch off evaluations and reports, which cost the same in every mode.
NOTHING_BUT_TRAINING = (
    "evaluate.before_training=false",
    "evaluate.every=0",
    "evaluate.images_per_prompt=1",
    "evaluate.max_prompts=1",
    "console=quiet",
    "monitor.report=false",
)
# With the tiny model: about one second each of generation and training per step, ten tickets per worker.
DEFAULT_LOAD = ("prompts_per_step=10", "rollout.num_inference_steps=9")
HEAD = ("variant", "step s", "images/s", "speed-up", "bound s", "step ÷ bound", "rollout busy", "trainer busy", "age")


Variants = Mapping[str, tuple[str, Sequence[str]]]  # Name of a variant → its mode and overrides.


@dataclass(frozen=True)
class Measured:
    variant: str
    step_seconds: float
    images_per_s: float
    bound_seconds: float
    busy: Mapping[str, float]  # Share of its time for which each pool computes, 0..1.
    staleness_mean: float
    weights_digest: str


def variants(devices: int, rollout: int) -> Variants:
    def workers(sampling: int, training: int) -> tuple[str, str]:
        return f"rollout.num_workers={sampling}", f"trainer.num_workers={training}"

    one, two = (ONE_POOL, *workers(devices, devices)), workers(rollout, devices - rollout)
    return {
        "sync shared": ("sync", one),
        BASELINE: ("sync", two),
        "stream": ("stream", two),
        "one_step_off": ("one_step_off", two),
        "one_step_off shared": ("one_step_off", one),
        "fully_async": ("fully_async", two),
    }


def chosen(options: argparse.Namespace) -> Variants:
    devices = sum(options.split) if options.split else options.devices or torch.cuda.device_count() or 2
    if options.devices not in (None, devices):
        raise ValueError(f"--split is of {devices} devices, got --devices {options.devices}: leave one of them out")
    if devices < 2:
        raise ValueError(f"separate pools need two devices or more, got --devices {devices}")
    every = variants(devices, options.split[0] if options.split else devices // 2)
    if unknown := [name for name in options.only if name not in every]:
        raise ValueError(unknown_name("--only", unknown[0], list(every)))
    return {name: words for name, words in every.items() if not options.only or name in options.only}


def run(name: str, mode: str, overrides: Sequence[str], folder: Path) -> Measured:
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", mode, f"output_dir={folder}"]
    command += [*NOTHING_BUT_TRAINING, *overrides]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{name} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
    return read(name, json.loads((folder / "summary.json").read_text(encoding="utf-8")))


def read(name: str, summary: Mapping[str, Any]) -> Measured:
    rate, bound = summary["steady_images_per_s"], (summary["bound"] or {}).get("seconds_per_step")
    if not rate or not bound:
        raise ValueError(f"{name} has no steady state: more steps are needed (--steps)")
    return Measured(
        variant=name,
        step_seconds=summary["images"] / summary["steps"] / rate,
        images_per_s=rate,
        bound_seconds=bound,
        busy={pool: states["busy"] / (sum(states.values()) or 1.0) for pool, states in summary["pools"].items()},
        staleness_mean=summary["staleness_mean"],
        weights_digest=summary["weights_digest"],
    )


def compare(options: argparse.Namespace, selected: Variants) -> list[dict[str, Measured]]:
    """Makes all repeats, forwards and backwards in turn, so that a slowing machine favours none."""
    overrides = [f"total_steps={options.steps}", *DEFAULT_LOAD, *options.overrides]
    rounds = []
    with tempfile.TemporaryDirectory() as place:
        for name, (mode, words) in selected.items():
            config = compose_config(mode, [*overrides, *words, f"output_dir={place}/none"])
            if config.total_steps <= (least := WARM_UP_STEPS + config.max_staleness):
                raise ValueError(f"--steps must be above {least} with the variant {name}, got {config.total_steps}")
        for repeat in range(options.repeats):
            measured = {}
            for name in reversed([*selected]) if repeat % 2 else selected:
                say(f"repeat {repeat + 1} of {options.repeats}: {name}\n", sys.stderr)
                mode, words = selected[name]
                folder = Path(place) / f"{repeat}-{name.replace(' ', '-')}"
                measured[name] = run(name, mode, [*overrides, *words], folder)
            rounds.append({name: measured[name] for name in selected})
    return rounds


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def markdown(command: str, rounds: Sequence[Mapping[str, Measured]]) -> str:
    """The table, medians with the smallest and largest value; ratios are taken within one repeat."""
    rows = []
    for name in rounds[0]:
        runs = [repeat[name] for repeat in rounds]
        gain = [repeat[BASELINE].step_seconds / repeat[name].step_seconds for repeat in rounds if BASELINE in repeat]
        rows.append(
            (
                name,
                spread([one.step_seconds for one in runs]),
                f"{median(one.images_per_s for one in runs):.1f}",
                spread(gain) if gain else "",
                f"{median(one.bound_seconds for one in runs):.2f}",
                spread([one.step_seconds / one.bound_seconds for one in runs]),
                *(f"{median(one.busy.get(pool, 0.0) for one in runs):.0%}" for pool in ("rollout", "trainer")),
                f"{median(one.staleness_mean for one in runs):.2f}",
            )
        )
    return f"    {command}\n\n{markdown_table(HEAD, rows)}\n"


def picture(rounds: Sequence[Mapping[str, Measured]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(rounds[0])
    rates = [median(repeat[name].images_per_s for repeat in rounds) for name in names]
    allowed = [
        median(repeat[name].images_per_s * repeat[name].step_seconds / repeat[name].bound_seconds for repeat in rounds)
        for name in names
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(names) + 1.6))
    axes.barh(names, allowed, color="#dddddd", label="its bound")
    axes.barh(names, rates, color="#1f5fa8", height=0.5, label="measured")
    axes.invert_yaxis()
    axes.set_xlabel("images per second over all devices")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})  # Equal results give equal files.
    pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    command_line = argparse.ArgumentParser(prog="async-flowrl benchmark", description=__doc__)
    option = command_line.add_argument
    option("overrides", nargs="*", metavar="key=value", help="configuration of all variants")
    option("--out", type=folder, default=Path("outputs/benchmark"), help="benchmark.{json,md,png} go here")
    option("--steps", type=count, default=9, help="training steps per run; the first two are warm-up")
    option("--repeats", type=count, default=2)
    option("--devices", type=count, help="default: all GPUs, or two CPU cores")
    option("--split", type=pair, metavar="R:T", help="rollout and trainer devices of the separate pools")
    option("--only", action="append", default=[], metavar="NAME", help="only this variant (and others given so)")
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_intermixed_args(words)
    try:
        rounds = compare(options, chosen(options))
    except ValueError as error:
        return refuse(error)
    command = shlex.join(["async-flowrl", "benchmark", *words])
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    record = {"command": command, "rounds": rounds}
    (out / "benchmark.json").write_text(json.dumps(record, indent=2, default=asdict) + "\n")
    (out / "benchmark.md").write_text(text := markdown(command, rounds), encoding="utf-8")
    picture(rounds, out / "benchmark.png")
    say(f"{text}\nwrote benchmark.json, benchmark.md and benchmark.png to {out}\n")
    return 0
