"""async-flowrl plan --rehearse: runs a configuration's workers on fake tensors (shapes and dtypes, no values).

`rehearse` returns memory, FLOPs, collectives and estimated seconds of a trainer rank and of a rollout worker; none of
them is measured. In what is printed GiB are 2**30 bytes; MB, GB and TFLOP are powers of ten.
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

from async_flowrl.cli.cards import CARDS, Card, Roofline, cards_of
from async_flowrl.cli.plan_memory import configured
from async_flowrl.config.messages import quieter
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import GIB
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.phases import Phase
from async_flowrl.memory.rehearsal.rank import RankRehearsal
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal
from async_flowrl.memory.rehearsed import whole_rank, whole_rollout
from async_flowrl.memory.trainer_layout import on_devices, resolved
from async_flowrl.tickets.arithmetic import check_batching
from separation.text_table import format_table

BOTH = "process that samples and trains"
TRAINING, SAMPLING = "update", "sample"  # The phases of either side at whose entry everything is there that lasts.
OF_PHASES = ("phase", "resident GiB", "peak GiB", "times", "kernels", "TFLOP", "estimated s", "collectives")
OF_CARDS = ("card", "fits", "ticket s", "micro-batch s", "generation s/step", "training s/step", "images/s", "longer")


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
    """Result of a rehearsal: both kinds of process, to be estimated for the card of `roofline`."""

    config: Config
    roofline: Roofline
    rank: RankRehearsal
    rollout: RolloutRehearsal

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.config, self.rank, self.rollout, self.roofline)

    @property
    def lacking(self) -> float:
        """Most bytes by which a process exceeds the card's memory; 0 if all fit."""
        return max(0.0, *(phase.peak - self.roofline.card.memory for phase in self.peaks().values()))

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

    def on(self, card: Card) -> "Rehearsal":
        """Returns the rehearsal to be estimated for another card; the counts are the same on every card."""
        return replace(self, roofline=Roofline(card, self.roofline.assumptions))


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
    config = resolved(config, on_devices(config, int(card.memory))).applied(config)
    model, roofline = FakeModel.of(config), Roofline(card)
    return Rehearsal(config, roofline, whole_rank(config, model), whole_rollout(config, model))


def estimate(config: Config, rank: RankRehearsal, rollout: RolloutRehearsal, roofline: Roofline) -> Estimate:
    """Estimates durations on the card of `roofline`, of the largest images with the longest prompt, as rehearsed."""
    tickets = config.prompts_per_step * config.group_size // config.images_per_ticket
    repeats = rollout.passes / rollout.run
    batch = sum(
        seconds(phase, roofline) * (repeats if name in ("denoise", "sample") else 1.0)
        for name, phase in rollout.phases.items()
        if name in ("denoise", "sample", "decode")
    )
    ticket = batch / rollout.tickets
    flops = (rollout.phases["denoise"].flops * repeats + rollout.phases["decode"].flops) / rollout.tickets
    forward, backward = (_once(roofline, rank.phases[name]) for name in ("forward", "backward"))
    optimizer = _once(roofline, rank.phases["optimizer"])
    per_pass = rank.phases["forward"].flops / rank.phases["forward"].entered
    per_update = per_pass + rank.phases["backward"].flops / rank.phases["backward"].entered
    passes, micro_batches = rank.frozen_passes, rank.micro_batches
    activation = roofline.activation(rollout.version_bytes, from_host=config.versions_on_host)
    sent = {name: phase.sent / phase.entered for name, phase in rank.phases.items()}
    return Estimate(
        ticket=ticket,
        generation=ticket * tickets / config.rollout.num_workers + activation,
        micro_batch=forward + backward,
        update=micro_batches * (forward + backward) + passes * forward + rank.optimizer_steps * optimizer,
        delivery=roofline.delivery(rank.version_bytes, rank.share_bytes),
        activation=activation,
        ticket_flops=flops,
        update_flops=micro_batches * per_update + passes * per_pass,
        update_sent=(micro_batches + passes) * sent["forward"]
        + micro_batches * sent["backward"]
        + rank.optimizer_steps * sent["optimizer"],
    )


def seconds(phase: Phase, roofline: Roofline) -> float:
    """Returns the estimated seconds of all kernels of a phase on the roofline's card, without collectives."""
    return sum(roofline.kernel(*kernel) * times for kernel, times in phase.kernels.items())


def _once(roofline: Roofline, phase: Phase) -> float:
    return (seconds(phase, roofline) + roofline.collective(phase.sent)) / phase.entered


def peak(phases: Iterable[Phase]) -> Phase:
    return max(phases, key=lambda phase: phase.peak)


def describe(done: Rehearsal) -> str:
    """Returns the text: tables of both kinds of process, what fits, the estimate, and its assumptions."""
    config, rank, rollout, card = done.config, done.rank, done.rollout, done.roofline.card
    shared = f", {rank.share_bytes / 1e6:.0f} MB of it on each rank" * (rank.share_bytes < rank.version_bytes)
    lines = [
        f"{config.model.path}: {rank.sizes.base_parameters / 1e9:.2f} B parameters, "
        f"{config.trained_in_words}: {rank.sizes.adapter_parameters / 1e6:.1f} M, "
        f"{rank.version_bytes / 1e6:.0f} MB per version{shared}; shapes only, nothing was computed",
        "",
        f"trainer rank ({rank.layout}), micro-batch of {rank.rows} rows",
        table(rank.phases, done.roofline),
        *(
            [f"{rank.host_bytes / GIB:.1f} GiB of pinned host memory hold its share of the base"]
            * bool(rank.host_bytes)
        ),
        "",
        f"rollout worker, {rollout.rows} images at once, {rollout.run} of {rollout.passes} forward passes of a "
        + ("ticket" if rollout.tickets == 1 else f"batch of {rollout.tickets} tickets"),
        table(rollout.phases, done.roofline),
        "",
        *fits(done),
        "",
        *sentences(done),
        "",
        f"Estimated for {card.name} by arithmetic; it takes for granted:",
        *(f"- {sentence}" for sentence in done.roofline.assumptions.sentences(card)),
    ]
    return "\n".join(lines) + "\n"


def table(phases: Mapping[str, Phase], roofline: Roofline) -> str:
    rows = [
        (
            phase.name,
            f"{phase.resident / GIB:.3g}",
            f"{phase.peak / GIB:.3g}",
            str(phase.entered),
            str(phase.kernels.total()),
            f"{phase.flops / 1e12:.3g}",
            f"{seconds(phase, roofline):.3g}",
            ", ".join(f"{name.strip('_')} {size / 1e9:.3g} GB" for name, size in sorted(phase.collectives.items())),
        )
        for phase in phases.values()
    ]
    return format_table(OF_PHASES, rows)


def fits(done: Rehearsal) -> list[str]:
    """Returns a sentence per process on whether its peak fits the card, without fragmentation and CUDA's own memory."""
    card = done.roofline.card
    sentences = []
    for title, phase in done.peaks().items():
        share = phase.peak / card.memory
        verdict = "does not fit" if share > 1 else "is tight on" if share > 0.9 else "fits"
        sentences.append(
            f"a {title} holds {phase.peak / GIB:.3g} GiB at most ({phase.name}): {verdict} {card.name}'s "
            f"{card.memory / GIB:.1f} GiB ({share:.0%}), fragments and CUDA's own memory aside"
        )
    return sentences


def sentences(done: Rehearsal) -> list[str]:
    config, times = done.config, done.estimate
    return [
        f"estimated: a ticket of {config.images_per_ticket} images {times.ticket:.3g} s "
        f"({times.ticket_flops / 1e12:.4g} TFLOP), a micro-batch {times.micro_batch:.3g} s, a delivery of "
        f"{done.rank.version_bytes / 1e6:.0f} MB {times.delivery:.3g} s, its activation {times.activation:.3g} s",
        f"estimated per training step: {times.generation:.4g} s of generation on {config.rollout.num_workers} rollout "
        f"workers, {times.update:.4g} s of training on {config.trainer.num_workers} ranks ({done.rank.micro_batches} "
        f"micro-batches, {done.rank.frozen_passes} passes without gradient, {times.update_sent / 1e9:.3g} GB sent per "
        f"rank); at least {done.step:.4g} s together",
    ]


def as_json(done: Rehearsal) -> dict[str, Any]:
    """Returns the rehearsal as a dictionary for JSON: sizes in bytes, times in seconds."""
    rank, rollout, card = done.rank, done.rollout, done.roofline.card
    return {
        **{
            side: {**asdict(of), "phases": {name: _phase(phase, done.roofline) for name, phase in of.phases.items()}}
            for side, of in (("trainer_rank", rank), ("rollout_worker", rollout))
        },
        "peak": {title.replace(" ", "_"): phase.peak for title, phase in done.peaks().items()},
        "fits": not done.lacking,
        "estimate": asdict(done.estimate),
        "card": asdict(card),
        "assumptions": done.roofline.assumptions.sentences(card),
    }


def _phase(phase: Phase, roofline: Roofline) -> dict[str, Any]:
    arithmetic = sum(
        roofline.kernel(*kernel) * times for kernel, times in phase.kernels.items() if roofline.is_arithmetic(*kernel)
    )
    whole = seconds(phase, roofline)
    return {
        **asdict(replace(phase, kernels=Counter())),
        "kernels": phase.kernels.total(),
        "flops": phase.flops,
        "collectives": dict(phase.collectives),
        "seconds": whole,
        "arithmetic": arithmetic,
        "traffic": whole - arithmetic,
    }


def by_card(done: Rehearsal, cards: Sequence[Card]) -> str:
    """Returns a table with a row per card; a step takes the longer of generation and training, or both."""
    rows = [_row(done.on(card)) for card in cards]
    layout = f"the same processes on each card; the base is held as on {done.roofline.card.name} ({done.rank.layout})"
    return f"By card, estimated by arithmetic ({layout}):\n{format_table(OF_CARDS, rows)}\n"


def _row(done: Rehearsal) -> tuple[str, ...]:
    estimated, config, missing = done.estimate, done.config, done.lacking
    return (
        done.roofline.card.name,
        f"no, {missing / GIB:.1f} GiB are missing" if missing else "yes",
        f"{estimated.ticket:.3g}",
        f"{estimated.micro_batch:.3g}",
        f"{estimated.generation:.3g}",
        f"{estimated.update:.3g}",
        f"{config.prompts_per_step * config.group_size / done.step:.3g}",
        "training" if estimated.update > estimated.generation else "generation",
    )


def main(arguments: Sequence[str]) -> None:
    """Prints the rehearsal. Raises ValueError if there is none."""
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --rehearse",
        description="Runs a configuration's trainer and rollout worker on shapes alone: memory, collectives, FLOPs.",
    )
    parser.add_argument(
        "--card",
        default="H100",
        metavar="NAME[,NAME…]",
        help=f"of {', '.join(CARDS)}, or all (default H100); of several, the first one's memory is planned for",
    )
    options, config = configured(parser, arguments)
    cards = cards_of(options.card)
    # The package's warnings are about values, and fake tensors have none.
    with quieter("async_flowrl", logging.ERROR):
        done = rehearse(config, cards[0])
    if options.json:
        on_cards = [done.on(card) for card in cards]
        priced = [
            {"card": asdict(of.roofline.card), "fits": not of.lacking, "estimate": asdict(of.estimate)}
            for of in on_cards
        ]
        sys.stdout.write(json.dumps({**as_json(done), "by_card": priced}, indent=2) + "\n")
    else:
        sys.stdout.write(describe(done) + (f"\n{by_card(done, cards)}" if len(cards) > 1 else ""))
