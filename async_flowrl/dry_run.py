"""`dry_run=true`: what a configuration would start and move, in a few lines, without starting anything."""

from async_flowrl.controller.launch import pools
from async_flowrl.payload import stored_bytes
from async_flowrl.prepare import Prepared, ends_before_its_epochs
from async_flowrl.recipe import shape, ticket_size
from separation.table import format_table


def describe_run(prepared: Prepared) -> str:
    """Pools, tickets and bytes per step."""
    config = prepared.config
    plan = shape(config)
    images = config.prompts_per_step * config.group_size
    rows = [
        (spec.name, spec.num_workers, f"{spec.gpus_per_worker:g}", spec.threads, spec.factory.rpartition(":")[2])
        for spec in pools(prepared)
    ]
    lines = [
        f"{config.mode}: max_staleness {config.max_staleness}, {config.hand_over} hand-over, {config.placement} pools",
        f"model {prepared.model.path} ({prepared.model.family}), algorithm {prepared.algorithm.name}",
        f"{config.total_steps} steps of {images} images: {plan.tickets_per_step} tickets of {ticket_size(config)}",
        f"at most {stored_bytes(config, prepared.shapes) / 1e6:.1f} MB of payload in the object store",
        *([sentence] if (sentence := ends_before_its_epochs(prepared)) else []),
        format_table(("pool", "workers", "GPUs each", "threads", "hosts"), rows),
    ]
    return "\n".join(lines) + "\n"
