"""async-flowrl plan --fit [EXPERIMENT ...] [KEY=VALUE ...]: recipes and the hardware they fit.

A recipe is an experiment of the configuration folder, with the overrides of the command line. Every row is a computed
memory plan of the command line that it shows; no worker is started and no model is downloaded.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from rich.console import Console
from rich.progress import track

from async_flowrl.cli.cards import gib_of
from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import REWARD, scoring_pools, workers_key
from async_flowrl.memory.devices import (
    Change,
    applied,
    gpus_by_pool,
    gpus_taken,
    overrides_of,
    processes,
    reward_seats,
)
from async_flowrl.memory.footprints import GIB, planned_rollout, planned_trainer
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.trainer_layout import resolved_on
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.tickets.arithmetic import check_batching

RECIPES = ("sd35_ocr", "qwen_image_ocr", "flux_pickscore")


@dataclass(frozen=True)
class Hardware:
    name: str  # [NODES x] DEVICES x GB, such as `8x80` or `2x8x80`.
    gib: float  # Memory of one device in GiB.
    devices: int  # Devices of all nodes.
    nodes: int = 1

    @classmethod
    def of(cls, name: str) -> "Hardware":
        parts = name.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"--cards must be like 4x24 (4 cards of 24 GB) or 2x8x80 (2 nodes of 8), got {name!r}")
        *counts, gb = map(int, parts)
        return cls(name, gib_of(gb), math.prod(counts), counts[0] if len(counts) > 1 else 1)


# Settings that reduce memory, in the order in which they are added.
SAVINGS: Change = {
    "rollout.text_encoder": "cached",
    "rollout.batch_size": 1,
    "trainer.gradient_checkpointing": "full",
    "trainer.micro_batch_size": 1,
    "trainer.shard": "full",
    "trainer.cpu_offload": True,
}
# Those of SAVINGS that need no second card.
ON_ONE_CARD = (
    "rollout.text_encoder",
    "rollout.batch_size",
    "trainer.gradient_checkpointing",
    "trainer.micro_batch_size",
)
# Settings of a small card, added one after the other where nothing else fits; then `lora.rank` is halved.
# With tune=full there is neither a base that could be quantized nor a rank.
SMALL_CARD: tuple[Change, ...] = (
    {**{key: SAVINGS[key] for key in ON_ONE_CARD}, "model.quantize": "int8", "model.quantize_text_encoder": "int8"},
    {"model.quantize": "nf4"},
    {"rollout.versions_on": "host", "trainer.versions_on": "host"},
    {"trainer.sum_on": "host"},
    {"rollout.vae_tiling": True},
)
LEAST_RANK = 16
# Recipes from the largest model and the most images per step on, for `largest`.
LARGEST_FIRST = (
    "qwen_image_ocr",
    "qwen_image_1x80gb",
    "qwen_image_1x24gb",
    "flux_1x24gb",
    "qwen_image_21_1x24gb",
    "sd35_1x16gb",
)
HARDWARE = ("1x24", "2x24", "1x80", "2x80", "4x80", "8x80", "2x8x80")


@dataclass(frozen=True)
class Answer:
    """Row of the table: one recipe on one hardware. Memory is in GiB."""

    experiment: str
    hardware: str
    fits: bool
    words: tuple[str, ...]  # Arguments of `async-flowrl train`; empty if no layout is possible on so few devices.
    trainer: float  # Memory that a trainer rank needs.
    rollout: float  # Memory that a rollout worker needs.
    device: float
    missing: float = 0.0  # Memory that the tightest kind of process lacks; 0 or negative if all fit.
    lacking: str = ""  # Name of that kind of process.

    @property
    def command(self) -> str:
        config_name, *overrides = self.words
        return f"async-flowrl train {config_name} {shlex.join(overrides)}"


def largest(hardware: Hardware) -> Answer | None:
    """Returns the first recipe of LARGEST_FIRST that fits without any savings; None if none does."""
    answers = (answer([f"experiment={name}"], hardware, layouts) for name in LARGEST_FIRST)
    return next((row for row in answers if row.fits), None)


def answer(
    recipe: Sequence[str], hardware: Hardware, tried: Callable[[Config, Hardware], Iterator[Change]] | None = None
) -> Answer:
    """The first of the changes `tried` of the overrides `recipe` that fits, or else the one that lacks least memory.

    Raises ConfigError for a recipe that cannot work on any machine.
    """
    words = [*recipe, *(["runtime.address=auto"] if hardware.nodes > 1 else [])]
    plain = compose_config("one_step_off", words)
    check(plain)
    answers: list[Answer] = []
    for change in (tried or candidates)(plain, hardware):
        config = applied(change, plain)
        try:
            check(config)
            check_batching(config)
        except ValueError:
            continue
        answers.append(judged(hardware, [*words, *overrides_of(change, plain)], at_largest(config)))
        if answers[-1].fits:
            return answers[-1]
    none = Answer(experiment_of(words), hardware.name, False, (), 0.0, 0.0, hardware.gib)
    return min(answers, key=lambda row: row.missing, default=none)


def experiment_of(words: Sequence[str]) -> str:
    return words[0].removeprefix("experiment=")


def judged(hardware: Hardware, words: Sequence[str], config: Config) -> Answer:
    device = round(hardware.gib * GIB)
    config, _ = resolved_on(config, device)
    memory = planned_trainer(config).total / GIB, planned_rollout(config).total / GIB, hardware.gib
    missing, lacking = max((p.footprint.total - p.available(device), p.title) for p in processes(config))
    typed = ("--config-name one_step_off", *words)
    return Answer(experiment_of(words), hardware.name, missing <= 0, typed, *memory, missing / GIB, lacking)


def candidates(plain: Config, hardware: Hardware) -> Iterator[Change]:
    """Yields changes of a recipe to try: layouts with more and more savings, then with more and more of SMALL_CARD."""
    whole = tuning_of(plain).whole
    for layout in layouts(plain, hardware):
        change = dict(layout)
        yield layout
        for key, value in SAVINGS.items():
            change[key] = value
            yield dict(change)
    for layout in layouts(plain, hardware):
        change = {**layout, **seats(plain, layout, hardware)}
        for more in SMALL_CARD:
            change |= {key: value for key, value in more.items() if key != "model.quantize" or not whole}
            yield dict(change)
        if whole:
            continue
        rank, alpha = plain.lora.rank, plain.lora.alpha
        while rank >= 2 * LEAST_RANK:
            rank, alpha = rank // 2, None if alpha is None else alpha / 2
            yield change | {"lora.rank": rank, "lora.alpha": alpha}


def layouts(plain: Config, hardware: Hardware) -> Iterator[Change]:
    """Yields the workers of each pool: every split of the devices, even ones first, then `placement=shared`."""
    # Reward pools and servers get their GPUs first. Pools of a single term have as many workers as configured, or after
    # that one, which is slower but takes fewer GPUs. A shared pool of a single process is tried last, unless it is the
    # recipe's own placement, which has no other layout.
    devices = hardware.devices
    fewer = {
        workers_key(pool.name): 1
        for pool in scoring_pools(plain)
        if pool.name != REWARD and pool.gpus_per_worker > 0 and pool.workers > 1
    }
    own = placement_of(plain).together
    for staff in ({}, fewer) if fewer else ({},):
        pairs = [] if own else splits(plain, devices, staff)
        yield from ({**workers(*pair), **staff} for pair in pairs)
        fewest = 1 if own or devices == 1 or staff == fewer else 2
        for count in range(devices, fewest - 1, -1):
            shared = {"placement": SHARED, **workers(count, count), **staff}
            if devices == 1:
                shared |= rest_of_one(applied(shared, plain))
            if gpus_taken(applied(shared, plain)) <= devices:
                yield shared
                break


def rest_of_one(config: Config) -> Change:
    """Returns the shares of a device for the process that samples and trains: what the others on it leave."""
    pools = gpus_by_pool(config)
    rest = 1 - sum(sum(pools[name]) for name in pools if name != SHARED)
    return {f"{pool}.gpus_per_worker": round(rest, 6) for pool in ("trainer", "rollout")} if 0 < rest < 1 else {}


def seats(plain: Config, layout: Change, hardware: Hardware) -> Change:
    """Returns shares of one device: those of reward workers as large as their models, the rest for the others."""
    needs = {p.key: p.footprint for p in reward_seats(applied(layout, plain)) if p.key and p.footprint.parts}
    shares = {key: min(1.0, math.ceil(20 * need.total / (hardware.gib * GIB)) / 20) for key, need in needs.items()}
    return {**shares, **rest_of_one(applied({**layout, **shares}, plain))} if hardware.devices == 1 else {}


def splits(config: Config, devices: int, staff: Change) -> list[tuple[int, int]]:
    """Returns (trainer ranks, rollout workers) that leave no room for one more, even splits first."""
    # The shared reward pool has as many workers as the rollout pool. So if its workers have whole GPUs, the sum of
    # trainer and rollout devices differs between splits.
    pairs = ((trainer, rollout) for trainer in range(1, devices) for rollout in range(1, devices - trainer + 1))
    fitting = {pair for pair in pairs if gpus_taken(applied({**workers(*pair), **staff}, config)) <= devices}
    largest = [(t, r) for t, r in fitting if (t + 1, r) not in fitting and (t, r + 1) not in fitting]
    return sorted(largest, key=lambda split: (-min(split), -sum(split), split))


def workers(trainer: int, rollout: int) -> Change:
    return {"rollout.num_workers": rollout, "trainer.num_workers": trainer, "reward.num_workers": rollout}


def markdown(answers: Sequence[Answer]) -> str:
    lines = ["| recipe | cards | fits | trainer rank | rollout worker |", "|---|---|---|---|---|"]
    for row in answers:
        fits, both = "yes" if row.fits else "**no**", f"{row.trainer:.1f} | {row.rollout:.1f}"
        if not row.words:
            fits, both = "**no**: it takes more cards", "– | –"
        elif not row.fits:
            fits += f": {row.missing:.1f} GiB are missing, {row.lacking}"
        lines.append(f"| `{row.experiment}` | {row.hardware} | {fits} | {both} |")
    for row in answers:
        if row.fits:
            lines += ["", f"`{row.experiment}` on {row.hardware}:", "", "```bash", row.command, "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --fit", description="Which recipes fit which hardware, and what to type."
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.add_argument("--cards", default=",".join(HARDWARE), metavar="[NODESx]CARDSxGB,…", help="as 4x24,2x8x80")
    parser.add_argument("words", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(RECIPES)}")
    parser.epilog = (
        "Words with = are overrides of all recipes, such as evaluate.reward.terms.judge.workers=2; "
        "a model=NAME without a recipe is planned with its family's values."
    )
    options = parser.parse_intermixed_args(arguments)
    words = [word.removeprefix("experiment=") for word in options.words]  # as `train` takes a recipe
    experiments = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    kinds = [Hardware.of(name) for name in options.cards.split(",")]
    recipes = [[f"experiment={name}"] for name in experiments or RECIPES]
    if not experiments and any(word.startswith(("model=", "model.path=")) for word in overrides):
        recipes = [[]]
    pairs = track([*product(recipes, kinds)], "memory plans", console=Console(stderr=True), transient=True)
    answers = [answer([*recipe, *overrides], kind) for recipe, kind in pairs]
    sys.stdout.write(json.dumps(answers, indent=2, default=asdict) + "\n" if options.json else markdown(answers))
