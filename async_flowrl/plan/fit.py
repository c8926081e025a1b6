"""Command `python -m async_flowrl.plan --fit [EXPERIMENT ...] [KEY=VALUE ...]`: recipes and the hardware they fit.

A recipe is an experiment of the configuration folder, with the overrides that are given. Every row is a computed memory
plan of the command line that it shows; no worker is started and no model is downloaded.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE
from async_flowrl.memory.largest import at_largest
from async_flowrl.memory.layout import AUTO
from async_flowrl.memory.meta_model import MetaModel, build_meta_model
from async_flowrl.memory.peaks import sampling_peak, training_peak
from async_flowrl.memory.processes import Footprint, in_one, rollout_footprint, trainer_footprint
from async_flowrl.memory.seats import describe_pools, gpus_taken, reward_seats
from async_flowrl.plan.fit_layouts import candidates
from async_flowrl.tickets.arithmetic import check_batching

GIB = 2**30
RECIPES = ("sd35_ocr", "qwen_image_ocr", "flux_pickscore")


@dataclass(frozen=True)
class Hardware:
    """Nodes that are alike, with devices that are alike."""

    name: str
    gib: float
    """Memory of one device in GiB."""
    per_node: int
    """Devices of one node."""
    nodes: int = 1

    @property
    def devices(self) -> int:
        return self.per_node * self.nodes


HARDWARE = (
    Hardware("1 x 24 GB", 24, 1),
    Hardware("2 x 24 GB", 24, 2),
    Hardware("1 x 80 GB", 79, 1),
    Hardware("2 x 80 GB", 79, 2),
    Hardware("4 x 80 GB", 79, 4),
    Hardware("8 x 80 GB", 79, 8),
    Hardware("2 nodes x 8 x 80 GB", 79, 8, 2),
)


@dataclass(frozen=True)
class Answer:
    """Row of the table: one recipe on one hardware. Memory is in GiB."""

    experiment: str
    hardware: str
    fits: bool
    words: tuple[str, ...]
    """Arguments of `async-flowrl train`; empty if no layout is possible on so few devices."""
    trainer: float
    """Memory that a trainer rank needs."""
    rollout: float
    """Memory that a rollout worker needs."""
    device: float
    missing: float = 0.0
    """Memory that the tightest kind of process lacks; 0 or negative if all fit."""
    lacking: str = ""
    """Name of that kind of process."""
    seats: str = ""
    """Workers of the reward pools and servers that have GPUs, in words; empty if there are none."""


class Recipe:
    """Recipe with a cache: its network is built once, and peaks of activations are counted once for each setting.

    Raises ConfigError for a recipe that cannot work on any machine.
    """

    def __init__(self, experiment: str, overrides: Sequence[str] = ()) -> None:
        self.experiment = experiment
        self.words = [f"experiment={experiment}", *overrides]
        self.plain = compose_config("one_step_off", self.words)
        check(self.plain)
        self._model: MetaModel | None = None
        self._training: dict[tuple[int, str], int] = {}
        self._sampling: dict[int, int] = {}

    def footprints(self, config: Config, device: int) -> tuple[Footprint, Footprint]:
        """Returns the memory of a trainer rank and of a rollout worker on devices of `device` bytes."""
        if self._model is None:
            self._model = build_meta_model(config)
        trainer, chunk = config.trainer, config.rollout.batch_size or config.images_per_ticket
        size = trainer.micro_batch_size, trainer.gradient_checkpointing
        if chunk not in self._sampling:
            self._sampling[chunk] = sampling_peak(config, self._model)
        if size not in self._training:  # Checkpointing cannot be removed from a network, so this takes a new one.
            self._training[size] = training_peak(config, build_meta_model(config))
        tried = [trainer_footprint(each, self._model, self._training[size]) for each in with_layouts(config)]
        trained = next((one for one in tried if one.total <= MEMORY_WARNING_SHARE * device), tried[-1])
        return trained, rollout_footprint(config, self._model, self._sampling[chunk])


def with_layouts(config: Config) -> list[Config]:
    """Returns the configuration with each value that `trainer.shard=auto` may have, cheapest first."""
    trainer = config.trainer
    if trainer.shard != AUTO or trainer.num_workers == 1:
        return [config]
    return [replace(config, trainer=replace(trainer, shard=shard)) for shard in ("none", "full")]


def answer(recipe: Recipe, hardware: Hardware) -> Answer:
    """Returns the first candidate that fits, or else the one that lacks the least memory.

    The answer has no words if every candidate is refused by the checks or takes more devices than the hardware has.
    """
    answers: list[Answer] = []
    for words in candidates(recipe.words, recipe.plain, hardware.devices):
        try:
            config = compose_config(words[0].removeprefix("--config-name "), words[1:])
            check(config)
            check_batching(config)
            config = at_largest(config)
        except (ConfigError, ValueError):
            continue
        if gpus_taken(config) > hardware.devices:
            continue
        answers.append(judged(recipe, hardware, words, config))
        if answers[-1].fits:
            return answers[-1]
    if not answers:
        return Answer(recipe.experiment, hardware.name, False, (), 0.0, 0.0, hardware.gib)
    return min(answers, key=lambda one: one.missing)


def judged(recipe: Recipe, hardware: Hardware, words: Sequence[str], config: Config) -> Answer:
    """Returns the answer for one candidate: `words` are its arguments, and `config` is their configuration."""
    device = round(hardware.gib * GIB)
    trainer, rollout = recipe.footprints(config, device)
    missing, lacking = max(shortages(config, trainer, rollout, device))
    return Answer(
        recipe.experiment,
        hardware.name,
        missing <= 0,
        tuple(words),
        trainer.total / GIB,
        rollout.total / GIB,
        hardware.gib,
        missing / GIB,
        lacking,
        describe_pools(config, without=("trainer", "rollout", "shared")),
    )


def shortages(config: Config, trainer: Footprint, rollout: Footprint, device: int) -> Iterator[tuple[float, str]]:
    """Yields (missing bytes, name) for each kind of process.

    Missing bytes are the planned memory less the process's share of a device of `device` bytes; negative if it fits.
    """
    shares = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker
    if config.placement == SHARED:
        both = in_one(trainer, rollout, full=config.tune == FULL)
        yield both.total - device * min(1.0, shares[0]), "process that samples and trains"
    else:
        yield trainer.total - device * min(1.0, shares[0]), "trainer rank"
        yield rollout.total - device * min(1.0, shares[1]), "rollout worker"
    for seat in reward_seats(config):
        yield seat.footprint.total - device * min(1.0, seat.gpus), seat.title


def markdown(answers: Sequence[Answer]) -> str:
    """Returns the answers as a Markdown table, memory in GiB."""
    lines = ["| recipe | hardware | fits | trainer rank | rollout worker | type |", "|---|---|---|---|---|---|"]
    for one in answers:
        if not one.words:
            lines.append(f"| `{one.experiment}` | {one.hardware} | **no** | – | – | it takes more devices |")
            continue
        both = f"{one.trainer:.1f} | {one.rollout:.1f}"
        typed = typed_words(one) if one.fits else f"at the least {one.missing:.1f} GiB are missing: {one.lacking}"
        lines.append(f"| `{one.experiment}` | {one.hardware} | {'yes' if one.fits else '**no**'} | {both} | {typed} |")
    return "\n".join(lines) + "\n"


def typed_words(one: Answer) -> str:
    """Returns the command line of a row as a shell reads it, and in brackets the seats of reward pools and servers."""
    config_name, *overrides = one.words
    command = f"`async-flowrl train {config_name} {shlex.join(overrides)}`"
    return f"{command} ({one.seats})" if one.seats else command


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns the exit code, 2 for a recipe that cannot be read or planned."""
    parser = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan --fit", description="Which recipes fit which hardware, and what to type."
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.add_argument("words", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(RECIPES)}")
    parser.epilog = "Words with = are overrides of all recipes, such as evaluate.reward.terms.judge.workers=2."
    given = parser.parse_args(arguments)
    experiments = [word for word in given.words if "=" not in word]
    overrides = [word for word in given.words if "=" in word]
    try:
        recipes = [Recipe(experiment, overrides) for experiment in experiments or RECIPES]
        answers = [answer(recipe, hardware) for recipe in recipes for hardware in HARDWARE]
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    sys.stdout.write(json.dumps([asdict(one) for one in answers], indent=2) + "\n" if given.json else markdown(answers))
    return 0
