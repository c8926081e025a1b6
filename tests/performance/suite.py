"""python -m tests.performance.suite [--out DIR] [key=value ...]: the ratios that runs are held to, each under its load.

The loads are found by measuring: a synthetic step is as long as it should be on any machine, and generation to training
are as 1, 1.2 and 0.83 to 1 wherever the bare loops say so.
"""

import argparse
import json
import logging
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from async_flowrl.benchmark import loops
from async_flowrl.benchmark.compare import compare, composed, parser
from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.table import as_json, as_sentence, markdown_table
from async_flowrl.benchmark.targets import MIN_STREAM_TICKETS, Results, Target, targets
from async_flowrl.benchmark.variants import Machine
from async_flowrl.run.prepare import prepare
from tests.performance import engines, payload

logger = logging.getLogger(__name__)

PROGRAM = ("python", "-m", "tests.performance.suite")

HEAD = ("what", "target", "measured", "met", "case")
PROBED_STEPS = (6, 10, 16, 26)
"""Denoising steps at which both loops are measured; their times are straight lines in between and a little beyond."""
MAX_STEPS = 40
TICKET = ("group_size=32",)
"""A quarter of a second on the tiny model: what a ticket costs beside its images counts as little as it does in use."""
MIN_STEP_SECONDS = 2.0
"""Of a step, as bare loops: what a step costs once, whatever its size, counts a little more than it does in use."""


@dataclass(frozen=True)
class Case:
    """One load and what is run under it."""

    name: str
    arguments: str
    """Of the command line."""
    ratio: float | None = None
    """G:T to look for; None = the arguments say it all."""
    least_prompts: int = 4
    rows: Mapping[str, str] | None = None
    """Key of a target → what the table calls it; {ratio} is G:T as measured."""


@dataclass(frozen=True)
class Suite:
    """Everything that was measured."""

    description: Mapping[str, str]
    cases: Mapping[str, Results]
    rows: Sequence[tuple[Target, str]]
    """Target and the case it is from."""
    commands: Mapping[str, str]


STEP = {"step": "`one_step_off` step ÷ max(G,T) at G:T = {ratio}"}
CASES = (
    Case(
        "balanced",
        "--only 'sync separate' --only stream --only one_step_off",
        ratio=1.0,
        least_prompts=MIN_STREAM_TICKETS,
        rows={
            **STEP,
            "speed_up": "{what}",
            "sync": "{what}",
            "stream": "{what}, 8 or more tickets per worker",
            "rollout": "{what}",
            "update": "{what}",
            "trainer_stall": "{what}",
            "worker_stall": "{what}",
        },
    ),
    Case("more generation", "--only one_step_off --no-contention", ratio=1.2, rows=STEP),
    Case("more training", "--only one_step_off --no-contention", ratio=1 / 1.2, rows=STEP),
    Case(
        "latency",
        "--only 'sync shared' --only one_step_off --no-contention --reward-latency-share 0.3 --reward-workers 6",
        ratio=1.0,
        rows={"in_turn": "{what}, each reward call 0.3 step"},
    ),
    Case(
        "demo",
        "--only one_step_off --no-contention --steps 40 --repeats 1 experiment=glyphs prompts_per_step=4 "
        "rollout.num_inference_steps=12",
        rows={"controller": "{what}, in the demo"},
    ),
)
"""Enough reward workers that none of the variants ever waits for a free one: the latency is a remote judge's."""


def measure(given: argparse.Namespace, directory: Path, keep: Callable[[Suite], None]) -> Suite:
    """All cases, one after the other, then what needs no run; `keep` gets what there is after each of them.

    Raises ValueError, ConfigError or RunFailed.
    """
    description = machine_description()
    machine = Machine.here(given.devices, given.split)
    shared = [f"--steps={given.steps}", f"--repeats={given.repeats}", f"--loop-seconds={given.loop_seconds:g}"]
    if given.devices or given.split:
        shared.append(f"--split={machine.rollout}:{machine.trainer}")
    logger.info("looking for the loads")
    pace = Pace.of(machine, given.overrides, directory)
    suite = Suite(description, {}, [], {})

    def add(name: str, command: str, rows: Sequence[tuple[Target, str]], **cases: Results) -> None:
        nonlocal suite
        commands = {**suite.commands, name: command}
        suite = Suite(description, {**suite.cases, **cases}, [*suite.rows, *rows], commands)
        for target, _ in rows:
            logger.info("  %s: %s (%s)", target.what, target.measured, target.wanted)
        keep(suite)

    for case in CASES:
        logger.info("case: %s", case.name)
        load = (*TICKET, *pace.load(case)) if case.ratio is not None else ()
        results = compare([*shared, *shlex.split(case.arguments), *load, *given.overrides], directory)
        add(case.name, results.command, rows_of(case, results), **{case.name: results})
    single = [f"rollout.num_inference_steps={pace.steps_for(1.0)}", "prompts_per_step=4", *given.overrides]
    command = shlex.join(["python", "-m", "tests.performance.engines", *single])
    add("single workers", command, [(target, "single workers") for target in single_workers(single, directory)])
    add("bytes", shlex.join(PROGRAM), [(store_bytes(), "bytes")])
    return suite


@dataclass(frozen=True)
class Pace:
    """Seconds per prompt of both pools as straight lines over the number of denoising steps: (slope, offset)."""

    generation: tuple[float, float]
    update: tuple[float, float]

    @classmethod
    def of(cls, machine: Machine, overrides: Sequence[str], directory: Path) -> "Pace":
        prompts = 6  # what an update does once, whatever its size, counts as little as in the runs
        shapes = [(f"prompts_per_step={prompts}", f"rollout.num_inference_steps={steps}") for steps in PROBED_STEPS]
        configs = [composed([*TICKET, *overrides, *shape], directory) for shape in shapes]
        measured = loops.side_by_side(configs, seconds=5.0)
        generation = [each.generation / prompts / machine.rollout for each in measured]
        update = [each.update / prompts / machine.trainer for each in measured]
        return cls(_line(generation), _line(update))

    def at(self, steps: int) -> tuple[float, float]:
        """(generation, update), seconds per prompt."""
        generation, update = (max(1e-9, slope * steps + offset) for slope, offset in (self.generation, self.update))
        return generation, update

    def steps_for(self, ratio: float) -> int:
        """Denoising steps at which generation ÷ update comes closest to `ratio`."""
        return min(range(4, MAX_STEPS + 1), key=lambda n: abs(math.log(self.at(n)[0] / self.at(n)[1] / ratio)))

    def load(self, case: Case) -> tuple[str, ...]:
        """Overrides that give the case its ratio and steps of a second."""
        assert case.ratio is not None
        steps = self.steps_for(case.ratio)
        prompts = max(case.least_prompts, math.ceil(MIN_STEP_SECONDS / max(self.at(steps))))
        return f"prompts_per_step={prompts}", f"rollout.num_inference_steps={steps}"


def rows_of(case: Case, results: Results) -> list[tuple[Target, str]]:
    """The case's lines of the table."""
    ratio = median(results.over(lambda r: results.generation(r.loops) / results.update(r.loops)))
    named = {target.key: target for target in targets(results)}
    return [
        (replace(named[key], what=what.format(what=named[key].what, ratio=f"{ratio:.2f}")), case.name)
        for key, what in (case.rows or {}).items()
        if key in named
    ]


def single_workers(overrides: Sequence[str], directory: Path) -> list[Target]:
    """One worker of each pool in this process, by CPU seconds: true also where the machine is busy."""
    ratios = engines.compare(prepare(composed(overrides, directory)), rounds=4)
    return [
        Target("pipeline", "bare loop ÷ `pipe(...)`, rate, CPU seconds", (ratios.bare_to_pipeline[1],), at_least=1.0),
        Target("one_rollout", "rollout worker ÷ bare loop, CPU seconds", (ratios.rollout_to_bare[1],), at_least=0.95),
        Target("one_trainer", "trainer rank ÷ bare loop, CPU seconds", (ratios.update_to_bare[1],), at_least=0.95),
    ]


def store_bytes() -> Target:
    measured = payload.measure()
    what = "object store per image ÷ (3 latents + embeddings ÷ group + image + 4 KB), window 2 of 10, 512 px"
    return Target("bytes", what, (measured.stored / measured.allowed,), at_most=1.0)


def markdown(suite: Suite) -> str:
    """The table, and below it what repeats each case."""
    rows = [[*target.cells(), case] for target, case in suite.rows]
    commands = "\n".join(f"    # {name}\n    {command}" for name, command in suite.commands.items())
    return f"{as_sentence(suite.description)}\n\n{markdown_table(HEAD, rows)}\n\n{commands}\n"


def write(suite: Suite, out: Path) -> None:
    """targets.json (every run and every row) and targets.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "targets.json").write_text(json.dumps(as_dictionary(suite), indent=2) + "\n")
    (out / "targets.md").write_text(markdown(suite))


def as_dictionary(suite: Suite) -> dict[str, Any]:
    return {
        "description": dict(suite.description),
        "rows": [{**asdict(target), "case": case} for target, case in suite.rows],
        "commands": dict(suite.commands),
        "cases": {name: as_json(results) for name, results in suite.cases.items()},
    }


def from_dictionary(record: Mapping[str, Any]) -> Suite:
    """The table of what `as_dictionary` wrote; the runs behind it stay in the file."""
    rows = []
    for row in record["rows"]:
        fields = {name: value for name, value in row.items() if name != "case"}
        rows.append((Target(**{**fields, "values": tuple(fields["values"])}), row["case"]))
    return Suite(record["description"], {}, rows, record["commands"])


def _line(values: Sequence[float]) -> tuple[float, float]:
    slope, offset = np.polyfit(PROBED_STEPS, values, 1)
    return float(slope), float(offset)


def main() -> int:
    given = parser(" ".join(PROGRAM)).parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = given.out.expanduser()
    with tempfile.TemporaryDirectory() as directory:
        suite = measure(given, Path(directory), lambda part: write(part, out))
    sys.stdout.write(f"{markdown(suite)}\nwrote targets.json and targets.md to {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
