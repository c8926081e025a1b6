"""python -m tests.performance.placements --before TREE [--out FILE] [--pairs 5] [--load 3:1]: one pool that does both.

Two cores, one thread per worker. G and T are the seconds of sampling and of training a step, measured alone in one
process. Both are taken before and after each shared run, and their mean counts. Loads differ in their denoising
steps and trained noise levels, so that G : T is about 3 : 1 and 1 : 1; for 1 : 3 that is not enough, and that load has
groups and micro-batches of 10 images in place of 14 too, and `trainer.gradient_checkpointing=full`. A step has 12
tickets and 12 groups to train, which are 12 units of work for each of two workers. `--load` measures only this load and
may be given several times. `--longer 2` doubles denoising steps and trained noise levels, so that a unit takes twice as
long: what a unit costs the controller and Ray does not grow with it.

    ideal       `placement=shared`, two processes: step ÷ ((G + T) / 2)
    separate    step of one rollout worker and one trainer rank ÷ that of `placement=shared`
    colocated   step of the best `sync` with `placement=colocated` ÷ that of `placement=shared`, while every reward
                takes .3 (G + T) / 2. TREE is a checkout of a commit that has that placement, e.g. b92f792

Everything is made in turns, pair by pair, and the worst pair counts. The results are written after every run.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.table import as_sentence, markdown_table
from tests.performance.placement_runs import Alone, Command, Lone, Run, lone, run

PROGRAM = "python -m tests.performance.placements"
HERE = Path(__file__).parents[2]
STEP = (
    "experiment=two_prompts",
    "algorithm=diffusion_nft",
    "model.tiny.layers=4",
    "trainer.learning_rate=1e-4",
    "group_size=14",
    "trainer.micro_batch_size=14",
    "prompts_per_step=12",
)
"""A ticket is a group of 14 images, and so is a micro-batch: 24 units of work."""


def load(denoising: int, levels: int) -> tuple[str, ...]:
    """A step that trains on `levels` noise levels of images made in `denoising` steps."""
    return (
        *STEP,
        f"rollout.num_inference_steps={denoising}",
        f"algorithm.timestep_range=[0,{levels}]",
    )


def loads(longer: int = 1) -> dict[str, tuple[str, ...]]:
    """Returns G : T, about, → settings; denoising steps and trained noise levels are multiplied by `longer`."""
    small = ("group_size=10", "trainer.micro_batch_size=10", "trainer.gradient_checkpointing=full")
    return {
        "3:1": load(12 * longer, longer),
        "1:1": load(8 * longer, 3 * longer),
        # With so much decoding beside them, trained levels alone do not come to three times the sampling.
        "1:3": (*load(8 * longer, 8 * longer), *small),
    }


LOADS = tuple(loads())
"""G : T, about; the table has the measured ones."""
UNEVEN = ("3:1", "1:3")
"""Where two pools of one device each leave one idle."""
LATENT = "1:1"
WAIT = 0.3
"""Of (G + T) / 2, for every reward."""
REWARD_WORKERS = 9
"""With these no group ever waits for a free one."""
TWO = ("trainer.num_workers=2", "rollout.num_workers=2")
SEPARATE = ("placement=separate", "trainer.num_workers=1", "rollout.num_workers=1")
COLOCATED = {
    "colocated sync, 1 x 2 threads": ("placement=colocated", "rollout.threads=2", "trainer.threads=2"),
    "colocated sync, 2 x 1 thread": ("placement=colocated", *TWO),
}
SHARED, WAITING = "shared", "shared, rewards that take time"
HEAD = ("what", "load", "accepted", "worst", "median (least-most)", "met")


@dataclass
class Measured:
    """All that was measured until now, in the order of the pairs."""

    command: str
    description: dict[str, str]
    alone: dict[str, list[Alone]] = field(default_factory=dict)
    together: dict[str, list[Alone]] = field(default_factory=dict)
    """The same by two processes at once, the mean of both: what the machine itself loses."""
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    """Load → name → one for each pair."""


@dataclass(frozen=True)
class Row:
    """A ratio of each pair, held to a bound."""

    what: str
    load: str
    bound: float
    values: list[float]
    most: bool
    """Whether the bound is the largest that is accepted; else the smallest."""

    @property
    def worst(self) -> float:
        return max(self.values) if self.most else min(self.values)

    @property
    def met(self) -> bool:
        return self.worst <= self.bound if self.most else self.worst >= self.bound

    def cells(self) -> tuple[str, ...]:
        values = self.values
        spread = f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
        accepted = f"{'≤' if self.most else '≥'} {self.bound:g}"
        return self.what, self.load, accepted, f"{self.worst:.3f}", spread, "yes" if self.met else "**no**"


class Pairs:
    """Makes the runs and keeps what they took."""

    def __init__(
        self, before: Path, out: Path, measured: Measured, steps: int, loads: Mapping[str, Sequence[str]]
    ) -> None:
        self.before, self.out, self.measured = before, out, measured
        self._steps, self.loads = steps, loads
        self._colocated = list(COLOCATED)

    def pair(self, workers: Sequence[Lone]) -> None:
        """Every measurement once."""
        for name in self.loads:
            before = self._mean(workers[:1], name)
            self._run(SHARED, name, HERE, "one_step_off", ("placement=shared", *TWO))
            after = self._mean(workers[:1], name)
            self._note(self.measured.alone, name, mean([before, after]))
            self._note(self.measured.together, name, self._mean(workers, name))
            if name in UNEVEN:
                self._run("separate", name, HERE, "one_step_off", SEPARATE)
            if name == LATENT:
                self._with_latency(name)

    def _with_latency(self, name: str) -> None:
        """The first pair finds out which way to colocate is the best; the others take it."""
        seconds = WAIT * median(alone.half for alone in self.measured.alone[name])
        wait = (
            "reward=color_and_latency",
            f"reward.terms.latency.options.seconds={seconds:.3f}",
            f"reward.num_workers={REWARD_WORKERS}",
        )
        self._run(WAITING, name, HERE, "one_step_off", ("placement=shared", *TWO, *wait))
        for way in self._colocated:
            self._run(way, name, self.before, "sync", (*COLOCATED[way], *wait))
        runs = self.measured.runs[name]
        self._colocated = [min(self._colocated, key=lambda way: runs[way][-1].step_seconds)]

    def _mean(self, workers: Sequence[Lone], name: str) -> Alone:
        for each in workers:
            each.ask(name)
        return mean([each.answer() for each in workers])

    def _run(self, what: str, name: str, tree: Path, mode: str, overrides: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            made = run(Command(tree, mode, (*self.loads[name], *overrides), self._steps), Path(directory))
        self._note(self.measured.runs.setdefault(name, {}), what, made)

    def _note(self, lists: dict[str, Any], key: str, value: Any) -> None:
        lists.setdefault(key, []).append(value)
        shown = " ".join(f"{name}={number:.3f}" for name, number in asdict(value).items())
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {key}: {shown}\n")
        sys.stdout.flush()
        self.out.write_text(json.dumps(as_json(self.measured), indent=1) + "\n")


def mean(found: Sequence[Alone]) -> Alone:
    """Of each of the two parts."""
    return Alone(fmean(one.generation for one in found), fmean(one.update for one in found))


def rows(measured: Measured) -> list[Row]:
    return [*_ideal(measured), *_separate(measured), *_colocated(measured)]


def _ideal(measured: Measured) -> Iterator[Row]:
    for load_, runs in measured.runs.items():
        values = [
            one.step_seconds / alone.half
            for one, alone in zip(runs[SHARED], measured.alone.get(load_, []), strict=False)
        ]
        if values:
            yield Row("`shared`, 2 processes: step ÷ ((G + T) / 2)", load_, 1.12, values, most=True)


def _separate(measured: Measured) -> Iterator[Row]:
    for load_ in UNEVEN:
        if values := _ratios(measured, load_, "separate", SHARED):
            yield Row("`separate`, 1 + 1 ÷ `shared`", load_, 1.3, values, most=False)


def _colocated(measured: Measured) -> Iterator[Row]:
    ways = {way: _ratios(measured, LATENT, way, WAITING) for way in COLOCATED}
    if best := max(ways.values(), key=len):
        # The one that went on is the better one of the first pair.
        yield Row(f"best `sync`, colocated ÷ `shared`, rewards take {WAIT} (G + T) / 2", LATENT, 1.15, best, most=False)


def _ratios(measured: Measured, load_: str, above: str, below: str) -> list[float]:
    runs = measured.runs.get(load_, {})
    pairs = zip(runs.get(above, []), runs.get(below, []), strict=False)
    return [one.step_seconds / other.step_seconds for one, other in pairs]


def markdown(measured: Measured) -> str:
    """The ratios, G and T, and what each run's processes took."""
    ratios = markdown_table(HEAD, [row.cells() for row in rows(measured)])
    head = ("load", "G s", "T s", "G : T", "both at once ÷ alone")
    lines = [(name, *_alone(measured, name)) for name in measured.alone]
    parts: tuple[tuple[str, Callable[[Run], float]], ...] = (
        ("step s", lambda one: one.step_seconds),
        ("CPU s of workers", lambda one: one.workers_cpu),
        ("of the driver", lambda one: one.driver_cpu),
        ("of Ray's own processes", lambda one: one.ray_cpu),
    )
    costs = [
        (name, what, *(f"{median(part(one) for one in runs):.3f}" for _, part in parts))
        for name, by_name in measured.runs.items()
        for what, runs in by_name.items()
    ]
    tables = [
        ratios,
        markdown_table(head, lines),
        markdown_table(("load", "run", *(part for part, _ in parts)), costs),
    ]
    return "\n\n".join([f"    {measured.command}", as_sentence(measured.description), *tables]) + "\n"


def as_json(measured: Measured) -> dict[str, Any]:
    """All that was measured, and the rows that are made of it."""
    return {**asdict(measured), "rows": [{**asdict(row), "met": row.met} for row in rows(measured)]}


def from_json(record: Mapping[str, Any]) -> Measured:
    """What `--out` holds; its rows are made again."""
    alone, together = (
        {load_: [Alone(**one) for one in each] for load_, each in record[key].items()} for key in ("alone", "together")
    )
    runs = {
        load_: {name: [Run(**one) for one in each] for name, each in by_name.items()}
        for load_, by_name in record["runs"].items()
    }
    return Measured(record["command"], dict(record["description"]), alone, together, runs)


def _alone(measured: Measured, name: str) -> tuple[str, ...]:
    generation, update = (median(getattr(one, key) for one in measured.alone[name]) for key in ("generation", "update"))
    pairs = zip(measured.together[name], measured.alone[name], strict=True)
    slower = [together.half / alone.half for together, alone in pairs]
    spread = f"{median(slower):.3f} ({min(slower):.3f}-{max(slower):.3f})"
    return f"{generation:.2f}", f"{update:.2f}", f"{generation / update:.2f}", spread


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--before", type=Path, required=True, help="checkout of a commit with placement=colocated")
    parser.add_argument("--out", type=Path, default=Path("outputs/placements.json"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--minutes", type=float, default=26.0, help="no pair begins that would end later")
    parser.add_argument("--load", choices=LOADS, action="append", help="only this one")
    parser.add_argument("--longer", type=int, default=1, help="factor on denoising steps and trained noise levels")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    measured = Measured(shlex.join([*PROGRAM.split(), *sys.argv[1:]]), machine_description())
    wanted, began = {name: loads(given.longer)[name] for name in given.load or LOADS}, time.monotonic()
    pairs = Pairs(given.before.resolve(), given.out, measured, given.steps, wanted)
    with lone(2, wanted) as workers:
        for done in range(given.pairs):
            if (time.monotonic() - began) / max(1, done) * (done + 1) > 60 * given.minutes and done:
                sys.stdout.write(f"{done} pairs: the next one would end after {given.minutes:g} minutes\n")
                break
            pairs.pair(workers)
    text = markdown(measured)
    given.out.with_suffix(".md").write_text(text)
    sys.stdout.write(text)
    return 0 if all(row.met for row in rows(measured)) else 1


if __name__ == "__main__":
    sys.exit(main())
