"""Result of a rehearsal, as text and as JSON. GiB are 2**30 bytes; MB, GB and TFLOP are powers of ten."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from async_flowrl.config.schema import FULL, SHARED, Config
from async_flowrl.memory.rehearsal.ledger import Phase
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal
from async_flowrl.memory.rehearsal.trainer import RankRehearsal
from async_flowrl.plan.cards import Roofline
from async_flowrl.plan.estimate import Estimate, peak, seconds
from separation.table import format_table

GIB = 2**30
BOTH = "process that samples and trains"
TRAINING, SAMPLING = "update", "sample"
"""The phases of either side at whose entry everything is there that lasts."""
HEAD = ("phase", "resident GiB", "peak GiB", "times", "kernels", "TFLOP", "estimated s", "collectives")


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal: both kinds of process, and the estimate for the card of `roofline`."""

    config: Config
    roofline: Roofline
    rank: RankRehearsal
    rollout: RolloutRehearsal
    estimate: Estimate

    @property
    def shared(self) -> bool:
        """Each process samples and trains."""
        return self.config.placement == SHARED

    @property
    def devices(self) -> int:
        """Devices of all trainer ranks and rollout workers."""
        trainers = self.config.trainer.num_workers
        return trainers if self.shared else trainers + self.config.rollout.num_workers

    def peaks(self) -> dict[str, Phase]:
        """Returns process title → the phase that needs the most memory."""
        rank, rollout = peak(self.rank.phases.values()), peak(self.rollout.phases.values())
        return {BOTH: self.in_one()} if self.shared else {"trainer rank": rank, "rollout worker": rollout}

    def in_one(self) -> Phase:
        """Returns the phase that needs the most memory in a process that samples and trains.

        While one side computes, all that lasts of the other one is there, too, and the frozen weights are there once.
        Only the rollout worker is loaded while nothing else is there.
        """
        training, sampling = self.rank.phases, dict(self.rollout.phases)
        alone = sampling.pop("load")
        highest = [alone]
        for phases, lasting in ((training, sampling[SAMPLING]), (sampling, training[TRAINING])):
            own = peak(phases.values())
            highest.append(replace(own, peak=own.peak + lasting.resident - self.rank.frozen_bytes))
        return peak(highest)


def describe(done: Rehearsal) -> str:
    """Returns the text: tables of both kinds of process, what fits, the estimate, and its assumptions."""
    config, rank, rollout, card = done.config, done.rank, done.rollout, done.roofline.card
    trained = "full weights, trained" if config.tune == FULL else "LoRA of"
    shared = f", {rank.share_bytes / 1e6:.0f} MB of it on each rank" * (rank.share_bytes < rank.version_bytes)
    lines = [
        f"{config.model.path}: {rank.sizes.base_parameters / 1e9:.2f} B parameters, "
        f"{trained} {rank.sizes.adapter_parameters / 1e6:.1f} M, {rank.version_bytes / 1e6:.0f} MB per version"
        f"{shared}; shapes only, nothing was computed",
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
        *(f"- {sentence}" for sentence in done.roofline.given.sentences(card)),
    ]
    return "\n".join(lines) + "\n"


def table(phases: Mapping[str, Phase], roofline: Roofline) -> str:
    """Returns a table with a row per phase."""
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
    return format_table(HEAD, rows)


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
    """Returns the estimate in sentences."""
    config, times = done.config, done.estimate
    return [
        f"estimated: a ticket of {config.images_per_ticket} images {times.ticket:.3g} s "
        f"({times.ticket_flops / 1e12:.4g} TFLOP), a micro-batch {times.micro_batch:.3g} s, a delivery of "
        f"{done.rank.version_bytes / 1e6:.0f} MB {times.delivery:.3g} s, its activation {times.activation:.3g} s",
        f"estimated per training step: {times.generation:.4g} s of generation on {config.rollout.num_workers} rollout "
        f"workers, {times.update:.4g} s of training on {config.trainer.num_workers} ranks ({done.rank.micro_batches} "
        f"micro-batches, {done.rank.frozen_passes} passes without gradient, {times.update_sent / 1e9:.3g} GB sent per "
        f"rank); {together(done)}",
    ]


def together(done: Rehearsal) -> str:
    """Returns what a training step takes, from the seconds of generation and training, as the end of a sentence."""
    generation, update = done.estimate.generation, done.estimate.update
    if done.shared:
        return f"each of {done.devices} processes does both, one after the other: {generation + update:.4g} s"
    return f"{'training' if update > generation else 'generation'} is the longer one"


def as_json(done: Rehearsal) -> dict[str, Any]:
    """Returns the rehearsal as a dictionary for JSON: sizes in bytes, times in seconds."""
    rank, rollout, card = done.rank, done.rollout, done.roofline.card
    return {
        "trainer_rank": {**asdict(rank), "phases": _phases(rank.phases, done.roofline)},
        "rollout_worker": {**asdict(rollout), "phases": _phases(rollout.phases, done.roofline)},
        "peak": {title.replace(" ", "_"): phase.peak for title, phase in done.peaks().items()},
        "fits": all(phase.peak <= card.memory for phase in done.peaks().values()),
        "estimate": asdict(done.estimate),
        "card": asdict(card),
        "assumptions": done.roofline.given.sentences(card),
    }


def _phases(phases: Mapping[str, Phase], roofline: Roofline) -> dict[str, dict[str, Any]]:
    return {name: _phase(phase, roofline) for name, phase in phases.items()}


def _phase(phase: Phase, roofline: Roofline) -> dict[str, Any]:
    """Returns the phase as a dictionary, with the number and the seconds of its kernels but not each kernel."""
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
