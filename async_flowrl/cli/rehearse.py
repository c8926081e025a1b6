"""async-flowrl plan --rehearse: runs a configuration's workers on fake tensors (shapes and dtypes, no values).

Nothing is measured. In what is printed GiB are 2**30 bytes; MB, GB and TFLOP are powers of ten.
"""

import argparse
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from async_flowrl.cli.cards import CARDS, Card, cards_of
from async_flowrl.cli.plan_memory import configured
from async_flowrl.config.error_text import quieter
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import GIB
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.phases import Phase
from async_flowrl.memory.rehearsal.rank import RankRehearsal
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal
from async_flowrl.memory.rehearsed import whole_rank, whole_rollout
from async_flowrl.memory.trainer_layout import resolved_on
from async_flowrl.tickets.arithmetic import check_batching
from separation.text_table import format_table

BOTH = "process that samples and trains"
TRAINING, SAMPLING = "update", "sample"  # The phases of either side at whose entry everything is there that lasts.
OF_PHASES = ("phase", "resident GiB", "peak GiB", "times", "kernels", "TFLOP", "estimated s", "collectives")


@dataclass(frozen=True)
class Estimate:
    """Seconds and FLOPs of one rollout worker and one trainer rank by the roofline model; none of them is measured."""

    ticket: float  # Seconds of one ticket: denoising and decoding, without the text encoders.
    # Seconds per training step, with its tickets spread evenly over the rollout workers, each of which activates one
    # version.
    generation: float
    micro_batch: float  # Seconds of forward and backward, collectives included.
    update: float  # Seconds of all passes and optimizer steps of a rank per training step.
    delivery: float  # Seconds to stage a version, send it to a rollout worker and receive it there.
    activation: float  # Seconds to put a version into a rollout worker's network, once per training step.
    ticket_flops: float
    update_flops: float  # FLOPs of a rank per training step.
    update_sent: float  # Bytes that a rank sends in collectives per training step.


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal: both kinds of process, to be estimated for `card`."""

    config: Config
    card: Card
    rank: RankRehearsal
    rollout: RolloutRehearsal

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.config, self.rank, self.rollout, self.card)

    @property
    def lacking(self) -> float:
        return max(0.0, *(phase.peak - self.card.memory for phase in self.peaks().values()))

    @property
    def step(self) -> float:
        """Seconds of generation and training per step, side by side if a step may be ahead of the other."""
        generation, update = self.estimate.generation, self.estimate.update
        side_by_side = self.config.max_staleness > 0
        return placement_of(self.config).step_seconds(generation, update) if side_by_side else generation + update

    def peaks(self) -> dict[str, Phase]:
        rank, rollout = peak(self.rank.phases.values()), peak(self.rollout.phases.values())
        together = placement_of(self.config).together
        return {BOTH: self.in_one()} if together else {"trainer rank": rank, "rollout worker": rollout}

    def in_one(self) -> Phase:
        """Returns the phase that needs the most memory in a process that samples and trains."""
        # While one side computes, all that lasts of the other one is there, too, and the frozen weights are there once.
        # Only the rollout worker is loaded while nothing else is there.
        training, sampling = self.rank.phases, dict(self.rollout.phases)
        alone = sampling.pop("load")
        highest = [alone]
        for phases, lasting in ((training, sampling[SAMPLING]), (sampling, training[TRAINING])):
            phase = peak(phases.values())
            highest.append(replace(phase, peak=phase.peak + lasting.resident - self.rank.frozen_bytes))
        return peak(highest)


def rehearse(config: Config, card: Card) -> Rehearsal:
    """Runs a trainer rank and a rollout worker on fake tensors. Raises ValueError if that is not possible."""
    check_batching(config)
    config = at_largest(config)
    if config.rollout.engine != "diffusers":
        raise ValueError(f"only rollout.engine=diffusers can be rehearsed, got {config.rollout.engine}")
    if config.trainer.compile or config.rollout.compile:
        raise ValueError("compiled networks cannot be rehearsed: set trainer.compile=false and rollout.compile=false")
    if config.lora.path is not None:
        raise ValueError("a warm start is not rehearsed, it needs the memory of one more version: leave lora.path out")
    config, _ = resolved_on(config, int(card.memory))
    model = FakeModel.of(config)
    return Rehearsal(config, card, whole_rank(config, model), whole_rollout(config, model))


def estimate(config: Config, rank: RankRehearsal, rollout: RolloutRehearsal, card: Card) -> Estimate:
    denoise, sample, decode = (rollout.phases[name] for name in ("denoise", "sample", "decode"))
    repeats = rollout.passes / rollout.run
    ticket = repeats * (seconds(denoise, card) + seconds(sample, card)) + seconds(decode, card)
    tickets = config.prompts_per_step * config.group_size // config.images_per_ticket / rollout.tickets
    activation = card.activation(rollout.version_bytes, from_host=config.versions_on_host)
    # Phase of a rank → how often it runs per training step.
    passes = {
        "forward": rank.micro_batches + rank.frozen_passes,
        "backward": rank.micro_batches,
        "optimizer": rank.optimizer_steps,
    }
    phases = {name: rank.phases[name] for name in passes}
    once = {name: _once(phase, card) for name, phase in phases.items()}
    return Estimate(
        ticket=ticket / rollout.tickets,
        generation=ticket * tickets / config.rollout.num_workers + activation,
        micro_batch=once["forward"] + once["backward"],
        update=sum(passes[name] * once[name] for name in passes),
        delivery=card.delivery(rank.version_bytes),
        activation=activation,
        ticket_flops=(denoise.flops * repeats + decode.flops) / rollout.tickets,
        update_flops=sum(passes[name] * phase.flops / phase.entered for name, phase in phases.items()),
        update_sent=sum(passes[name] * phase.sent / phase.entered for name, phase in phases.items()),
    )


def seconds(phase: Phase, card: Card) -> float:
    return sum(card.kernel(*kernel) * times for kernel, times in phase.kernels.items())


def _once(phase: Phase, card: Card) -> float:
    return (seconds(phase, card) + card.collective(phase.sent)) / phase.entered


def peak(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.peak)


def describe(done: Rehearsal, cards: Sequence[Card]) -> str:
    config, card = done.config, done.card
    lines = [f"{config.model.path}, {config.trained_in_words}; shapes only, nothing was computed", ""]
    for title, side in (("trainer rank", done.rank), ("rollout worker", done.rollout)):
        counts = {name: value for name, value in vars(side).items() if isinstance(value, int | str)}
        facts = ", ".join(f"{name} {value}" for name, value in counts.items())
        lines += [f"{title}: {facts}", table(side.phases, card), ""]
    lines += [
        f"a {title} holds {phase.peak / GIB:.3g} GiB at most ({phase.name}), {phase.peak / card.memory:.0%} of "
        f"{card.name}'s {card.memory / GIB:.1f} GiB, fragments and CUDA's own memory aside"
        for title, phase in done.peaks().items()
    ]
    lines += ["", estimates(done, cards), ""]
    lines += [f"Estimated for {card.name} by arithmetic; it takes for granted:"]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in card.assumptions)]) + "\n"


def table(phases: Mapping[str, Phase], card: Card) -> str:
    rows = [
        (
            phase.name,
            f"{phase.resident / GIB:.3g}",
            f"{phase.peak / GIB:.3g}",
            str(phase.entered),
            str(phase.kernels.total()),
            f"{phase.flops / 1e12:.3g}",
            f"{seconds(phase, card):.3g}",
            ", ".join(f"{name.strip('_')} {size / 1e9:.3g} GB" for name, size in sorted(phase.collectives.items())),
        )
        for phase in phases.values()
    ]
    return format_table(OF_PHASES, rows)


def as_json(done: Rehearsal, cards: Sequence[Card]) -> dict[str, Any]:
    on_cards = [replace(done, card=card) for card in cards]
    return {
        "trainer_rank": {**asdict(done.rank), "phases": _phases(done.rank.phases, done.card)},
        "rollout_worker": {**asdict(done.rollout), "phases": _phases(done.rollout.phases, done.card)},
        "peak": {title.replace(" ", "_"): phase.peak for title, phase in done.peaks().items()},
        "fits": not done.lacking,
        "estimate": asdict(done.estimate),
        "card": asdict(done.card),
        "assumptions": done.card.assumptions,
        "by_card": [
            {"card": asdict(of.card), "fits": not of.lacking, "estimate": asdict(of.estimate)} for of in on_cards
        ],
    }


def _phases(phases: Mapping[str, Phase], card: Card) -> dict[str, Any]:
    return {
        name: {
            **asdict(replace(phase, kernels=Counter())),
            "kernels": phase.kernels.total(),
            "flops": phase.flops,
            "seconds": seconds(phase, card),
        }
        for name, phase in phases.items()
    }


def estimates(done: Rehearsal, cards: Sequence[Card]) -> str:
    """Returns a column per card; the processes, which hold the base as on the first one, stay the same."""
    on_cards = [replace(done, card=card) for card in cards]
    columns = [{"GiB missing": on.lacking / GIB, **asdict(on.estimate), "step, at least": on.step} for on in on_cards]
    rows = [(name.replace("_", " "), *(f"{column[name]:.4g}" for column in columns)) for name in columns[0]]
    return format_table(("estimated seconds, FLOPs, bytes", *(card.name for card in cards)), rows)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --rehearse", description="Runs a trainer rank and a rollout worker on shapes alone."
    )
    names = f"of {', '.join(CARDS)}, or all; the first one's memory is planned for"
    parser.add_argument("--card", default="H100", metavar="NAME[,NAME…]", help=names)
    options, config = configured(parser, arguments)
    cards = cards_of(options.card)
    # The package's warnings are about values, and fake tensors have none.
    with quieter("async_flowrl", logging.ERROR):
        done = rehearse(config, cards[0])
    if options.json:
        sys.stdout.write(json.dumps(as_json(done, cards), indent=2) + "\n")
    else:
        sys.stdout.write(describe(done, cards))
