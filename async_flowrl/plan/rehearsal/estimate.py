"""Arithmetic from what was rehearsed to seconds per ticket, micro-batch, training step and delivery."""

from collections.abc import Iterable
from dataclasses import dataclass

from async_flowrl.config.schema import Config
from async_flowrl.plan.rehearsal.cards import Roofline
from async_flowrl.plan.rehearsal.ledger import Phase
from async_flowrl.plan.rehearsal.rollout import RolloutRehearsal
from async_flowrl.plan.rehearsal.trainer import RankRehearsal


@dataclass(frozen=True)
class Estimate:
    """Seconds and FLOPs of one rollout worker and one trainer rank, by roofline; nothing of it was observed."""

    ticket: float
    generation: float
    """A training step's tickets, spread evenly over the rollout workers."""
    micro_batch: float
    """Forward and backward, collectives included."""
    update: float
    """A training step's passes and optimizer steps on a rank."""
    delivery: float
    ticket_flops: float
    update_flops: float
    update_sent: float
    """Bytes that a rank sends in collectives in a training step."""


def estimate(config: Config, rank: RankRehearsal, rollout: RolloutRehearsal, roofline: Roofline) -> Estimate:
    """For the recipe's numbers of workers."""
    tickets = config.prompts_per_step * config.group_size // config.images_per_ticket
    repeats = rollout.passes / rollout.run
    ticket = sum(
        phase.seconds(roofline) * (repeats if name in ("denoise", "sample") else 1.0)
        for name, phase in rollout.phases.items()
        if name in ("denoise", "sample", "decode")
    )
    flops = rollout.phases["denoise"].flops * repeats + rollout.phases["decode"].flops
    forward, backward = (_once(roofline, rank.phases[name]) for name in ("forward", "backward"))
    optimizer = _once(roofline, rank.phases["optimizer"])
    per_pass = rank.phases["forward"].flops / rank.phases["forward"].entered
    per_update = per_pass + rank.phases["backward"].flops / rank.phases["backward"].entered
    passes, micro_batches = rank.frozen_passes, rank.micro_batches
    sent = {name: phase.sent / phase.entered for name, phase in rank.phases.items()}
    return Estimate(
        ticket=ticket,
        generation=ticket * tickets / config.rollout.num_workers,
        micro_batch=forward + backward,
        update=micro_batches * (forward + backward) + passes * forward + rank.optimizer_steps * optimizer,
        delivery=roofline.delivery(rank.version_bytes),
        ticket_flops=flops,
        update_flops=micro_batches * per_update + passes * per_pass,
        update_sent=(micro_batches + passes) * sent["forward"]
        + micro_batches * sent["backward"]
        + rank.optimizer_steps * sent["optimizer"],
    )


def _once(roofline: Roofline, phase: Phase) -> float:
    """Seconds each time the phase is entered."""
    return (phase.seconds(roofline) + roofline.collective(phase.sent)) / phase.entered


def peak(phases: Iterable[Phase]) -> Phase:
    """The phase that needs the most memory."""
    return max(phases, key=lambda phase: phase.peak)
