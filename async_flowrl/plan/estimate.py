"""Estimate of seconds per ticket, micro-batch, training step and delivery, computed from a rehearsal's counts."""

from collections.abc import Iterable
from dataclasses import dataclass

from async_flowrl.config.schema import Config
from async_flowrl.memory.rehearsal.ledger import Phase
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal
from async_flowrl.memory.rehearsal.trainer import RankRehearsal
from async_flowrl.plan.cards import Roofline


@dataclass(frozen=True)
class Estimate:
    """Seconds and FLOPs of one rollout worker and one trainer rank by the roofline model; none of them is measured."""

    ticket: float
    """Seconds of one ticket: denoising and decoding, without the text encoders."""
    generation: float
    """Seconds per training step, with its tickets spread evenly over the rollout workers, each of which activates one
    version."""
    micro_batch: float
    """Seconds of forward and backward, collectives included."""
    update: float
    """Seconds of all passes and optimizer steps of a rank per training step."""
    delivery: float
    """Seconds to stage a version, send it to a rollout worker and receive it there."""
    activation: float
    """Seconds to put a version into a rollout worker's network, once per training step."""
    ticket_flops: float
    update_flops: float
    """FLOPs of a rank per training step."""
    update_sent: float
    """Bytes that a rank sends in collectives per training step."""


def estimate(config: Config, rank: RankRehearsal, rollout: RolloutRehearsal, roofline: Roofline) -> Estimate:
    """Estimates the configuration's durations with its numbers of workers, on the card of `roofline`.

    All images count as the largest ones with the longest prompt, which were rehearsed.
    """
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
    """Returns the mean seconds per entry of the phase, collectives included."""
    return (seconds(phase, roofline) + roofline.collective(phase.sent)) / phase.entered


def peak(phases: Iterable[Phase]) -> Phase:
    """Returns the phase that needs the most memory."""
    return max(phases, key=lambda phase: phase.peak)
