"""async-flowrl plan --fit [EXPERIMENT ...] [KEY=VALUE ...]: recipes and the hardware they fit.

A recipe is an experiment of the configuration folder, with the overrides of the command line. Every row is a computed
memory plan of the command line that it shows; no worker is started and no model is downloaded.
"""

import argparse
import json
import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from async_flowrl.cli.cards import GIB_OF_GB
from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config
from async_flowrl.config.placement import placement_of
from async_flowrl.config.pools import HELD_OUT, REWARD, scoring_pools, served_terms, workers_key
from async_flowrl.config.schema import SHARED, Config, RewardTerm
from async_flowrl.memory.devices import describe_pools, gpus_taken, processes
from async_flowrl.memory.footprints import GIB, planned_rollout, planned_trainer
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.trainer_layout import on_devices, resolved
from async_flowrl.tickets.arithmetic import check_batching

Staff = Mapping[str, int]  # Reward pool of a single term that has GPUs (`reward/X`, `held_out/X`) → its workers.
RECIPES = ("sd35_ocr", "qwen_image_ocr", "flux_pickscore")


@dataclass(frozen=True)
class Hardware:
    name: str  # [NODES x] DEVICES x GB, such as `8x80` or `2x8x80`.
    gib: float  # Memory of one device in GiB.
    devices: int  # Devices of all nodes.
    nodes: int = 1

    @classmethod
    def of(cls, name: str) -> "Hardware":
        """Returns the hardware of a name. Raises ValueError for another form."""
        parts = name.lower().split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ValueError(f"--cards must be like 4x24 (4 cards of 24 GB) or 2x8x80 (2 nodes of 8), got {name!r}")
        *counts, gb = map(int, parts)
        return cls(name, round(gb * GIB_OF_GB, 1), math.prod(counts), counts[0] if len(counts) > 1 else 1)


UNBROKEN: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
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
    seats: str = ""  # Workers of the reward pools and servers that have GPUs, in words; empty if there are none.


def answer(recipe: Sequence[str], hardware: Hardware) -> Answer:
    """Returns the first candidate for the overrides `recipe` that fits, or else the one that lacks the least memory.

    It has no words if all candidates are refused or take more devices than the hardware has. Raises ConfigError for a
    recipe that cannot work on any machine.
    """
    experiment = recipe[0].removeprefix("experiment=") if recipe else ""
    more = ["runtime.address=auto"] if hardware.nodes > 1 else []
    plain = compose_config("one_step_off", recipe)
    check(plain)
    answers: list[Answer] = []
    for words in candidates([*recipe, *more], plain, hardware.devices):
        try:
            config = compose_config(words[0].removeprefix("--config-name "), words[1:])
            check(config)
            check_batching(config)
        except ValueError:
            continue
        if gpus_taken(config) > hardware.devices:
            continue
        answers.append(judged(experiment, hardware, words, at_largest(config)))
        if answers[-1].fits:
            return answers[-1]
    if not answers:
        return Answer(experiment, hardware.name, False, (), 0.0, 0.0, hardware.gib)
    return min(answers, key=lambda row: row.missing)


def judged(experiment: str, hardware: Hardware, words: Sequence[str], config: Config) -> Answer:
    """Returns the answer for one candidate: `words` are its arguments, and `config` is their configuration."""
    device = round(hardware.gib * GIB)
    config = resolved(config, on_devices(config, device)).applied(config)
    memory = planned_trainer(config).total / GIB, planned_rollout(config).total / GIB, hardware.gib
    missing, lacking = max((p.footprint.total - p.available(device), p.title) for p in processes(config))
    seats = describe_pools(config, without=("trainer", "rollout", "shared"))
    return Answer(experiment, hardware.name, missing <= 0, tuple(words), *memory, missing / GIB, lacking, seats)


def candidates(words: Sequence[str], plain: Config, devices: int) -> Iterator[list[str]]:
    """Yields the arguments of `async-flowrl train` to try: for each layout the plain recipe, then with more savings."""
    for staff in staffs(plain):
        for layout in layouts(words, plain, devices, staff):
            saved: list[str] = []
            yield layout
            for saving in savings(plain):
                saved.append(saving)
                yield [*layout, *saved]


def staffs(config: Config) -> Iterator[Staff]:
    """Yields the workers of each reward pool of a single term: first as configured, then one per pool."""
    # One worker per pool is slower but needs fewer GPUs.
    configured = {p.name: p.workers for p in scoring_pools(config) if p.name != REWARD and p.gpus_per_worker > 0}
    yield configured
    if any(count > 1 for count in configured.values()):
        yield dict.fromkeys(configured, 1)


def layouts(words: Sequence[str], config: Config, devices: int, staff: Staff) -> Iterator[list[str]]:
    """Yields the arguments for each split of the devices into rollout and trainer workers, even splits first."""
    # The reward pools of `staff` and the reward servers get their GPUs first; trainer and rollout get all that are
    # left. The last layout has `placement=shared`, with as many processes as fit. A layout with a single process is
    # tried only if no smaller `staff` follows or if `shared` is the recipe's own placement, which then has no other
    # layout. With `devices` of 1, all pools share that device.
    if devices == 1:
        yield from _one_device(words, config, staff)
        return
    if not placement_of(config).together:
        for trainer, rollout in splits(config, devices, staff):
            yield ["--config-name one_step_off", *words, *_counts(config, trainer, rollout, staff)]
    together = replace(config, placement=SHARED)
    fewest = 1 if placement_of(config).together or max(staff.values(), default=1) == 1 else 2
    for count in range(devices, fewest - 1, -1):
        if gpus_taken(with_workers(together, count, count, staff)) <= devices:
            yield _shared(words, config, _counts(config, count, count, staff))
            return


def splits(config: Config, devices: int, staff: Staff) -> list[tuple[int, int]]:
    """Returns (trainer ranks, rollout workers) that leave no room for one more, even splits first."""
    # The shared reward pool has as many workers as the rollout pool. So if its workers have whole GPUs, the sum of
    # trainer and rollout devices differs between splits.
    pairs = ((trainer, rollout) for trainer in range(1, devices) for rollout in range(1, devices - trainer + 1))
    fitting = {pair for pair in pairs if gpus_taken(with_workers(config, *pair, staff)) <= devices}
    largest = [(t, r) for t, r in fitting if (t + 1, r) not in fitting and (t, r + 1) not in fitting]
    return sorted(largest, key=lambda split: (-min(split), -sum(split), split))


def savings(config: Config) -> Iterator[str]:
    """Yields settings that reduce memory, in the order in which they are added."""
    yield "rollout.text_encoder=cached"
    yield "rollout.batch_size=1"
    if config.trainer.gradient_checkpointing != "full":
        yield "trainer.gradient_checkpointing=full"
    yield "trainer.micro_batch_size=1"
    yield "trainer.shard=full"
    yield "trainer.cpu_offload=true"


def with_workers(config: Config, trainer: int, rollout: int, staff: Staff) -> Config:
    """Returns the configuration with these numbers of workers; the shared reward pool has as many as rollout has."""

    def staffed(terms: Mapping[str, RewardTerm], prefix: str) -> dict[str, RewardTerm]:
        return {
            name: replace(term, workers=staff.get(f"{prefix}/{name}", term.workers)) for name, term in terms.items()
        }

    held_out = replace(config.evaluate.reward, terms=staffed(config.evaluate.reward.terms, HELD_OUT))
    return replace(
        config,
        trainer=replace(config.trainer, num_workers=trainer),
        rollout=replace(config.rollout, num_workers=rollout),
        reward=replace(config.reward, num_workers=rollout, terms=staffed(config.reward.terms, REWARD)),
        evaluate=replace(config.evaluate, reward=held_out),
    )


def _one_device(words: Sequence[str], config: Config, staff: Staff) -> Iterator[list[str]]:
    # One process samples and trains on all that the shares of reward pools and servers leave.
    pools = scoring_pools(with_workers(config, 1, 1, staff))
    seated = sum(pool.workers * pool.gpus_per_worker for pool in pools)
    seated += sum(serve.gpus * serve.replicas for _, serve in served_terms(config))
    if seated >= 1:
        return
    settings = _counts(config, 1, 1, staff)
    settings += [f"{pool}.gpus_per_worker={1 - seated:g}" for pool in ("trainer", "rollout")] if seated else []
    yield _shared(words, config, settings)


def _shared(words: Sequence[str], config: Config, settings: Sequence[str]) -> list[str]:
    placement = [] if placement_of(config).together else [f"placement={SHARED}"]
    return ["--config-name one_step_off", words[0], *placement, *words[1:], *settings]


def _counts(config: Config, trainer: int, rollout: int, staff: Staff) -> list[str]:
    numbers = {
        "rollout.num_workers": (rollout, config.rollout.num_workers),
        "trainer.num_workers": (trainer, config.trainer.num_workers),
        "reward.num_workers": (rollout, config.reward.num_workers),
    }
    counts = [f"{key}={value}" for key, (value, usual) in numbers.items() if value != usual]
    pools = scoring_pools(replace(config, reward=replace(config.reward, num_workers=rollout)))
    moved = [pool.name for pool in pools if staff.get(pool.name, pool.workers) != pool.workers]
    return [*counts, *(f"{workers_key(name)}={staff[name]}" for name in moved)]


def markdown(answers: Sequence[Answer]) -> str:
    """Returns the answers as a Markdown table, memory in GiB, and below it the commands."""
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
            seats = f", with {row.seats}" if row.seats else ""
            lines += ["", f"`{row.experiment}` on {row.hardware}{seats}:", "", "```bash", typed_words(row), "```"]
    return "\n".join(lines) + "\n"


def typed_words(row: Answer) -> str:
    """Returns the command line of a row as a shell reads it, in lines of about 76 characters, broken between words."""
    config_name, *overrides = row.words
    words = (shlex.quote(word).replace(" ", "\0") for word in overrides)  # no line is broken inside a word
    lines = textwrap.wrap(f"async-flowrl train {config_name} {' '.join(words)}", 76, **UNBROKEN)
    return " \\\n".join(lines).replace("\0", " ")


def main(arguments: Sequence[str]) -> None:
    """Prints the table. Raises ValueError for a recipe that cannot be read or planned."""
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --fit", description="Which recipes fit which hardware, and what to type."
    )
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.add_argument("--cards", default=",".join(HARDWARE), metavar="[NODESx]CARDSxGB,…", help="as 4x24,2x8x80")
    parser.add_argument("words", nargs="*", metavar="EXPERIMENT", help=f"default: {' '.join(RECIPES)}")
    parser.epilog = "Words with = are overrides of all recipes, such as evaluate.reward.terms.judge.workers=2."
    options = parser.parse_intermixed_args(arguments)
    experiments = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    kinds = [Hardware.of(name) for name in options.cards.split(",")]
    answers = [answer([f"experiment={name}", *overrides], kind) for name in experiments or RECIPES for kind in kinds]
    rows = [asdict(row) for row in answers]
    sys.stdout.write(json.dumps(rows, indent=2) + "\n" if options.json else markdown(answers))
