"""Memory plans as text and as JSON: `python -m async_flowrl.plan --memory`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan.memory import MARGIN_SHARE, RUNTIME_BYTES, Footprint, MemoryPlan, plan_memory
from separation.table import format_table

GIB = 2**30


def describe(plan: MemoryPlan, config: Config, device_gib: float) -> str:
    """Tables of both kinds of process and one sentence on what fits. GiB are 2**30 bytes, MB and GB powers of ten."""
    model = plan.model
    whole = f"{config.model.path}: {model.base_parameters / 1e9:.2f} B parameters in {len(model.block_bytes)} blocks"
    adapter = (
        f"LoRA of {model.adapter_parameters / 1e6:.1f} M parameters, {plan.adapter_bytes / 1e6:.0f} MB per version"
    )
    sections = [f"{whole}, {adapter}", ""]
    for title, footprint in processes(plan, config):
        rows = [(name, f"{size / GIB:.2f}") for name, size in footprint.parts.items()]
        extra = footprint.total - sum(footprint.parts.values())
        rows.append((f"margin {MARGIN_SHARE:.0%} and {RUNTIME_BYTES / GIB:.1f} of runtime", f"{extra / GIB:.2f}"))
        rows.append(("together", f"{footprint.total / GIB:.2f}"))
        sections += [format_table((title, "GiB"), rows), ""]
    if plan.host:
        sections += [
            f"each trainer rank also pins {plan.host / GIB:.1f} GiB of host memory for its share of the base",
            "",
        ]
    payload = f"{plan.ticket_bytes / 1e6:.1f} MB per ticket, at most {plan.payload / 1e9:.2f} GB in the object store"
    return "\n".join([*sections, payload, *(verdict(plan, config, device_gib))]) + "\n"


def processes(plan: MemoryPlan, config: Config) -> list[tuple[str, Footprint]]:
    """Trainer rank and rollout worker, each with its footprint; one sum of both where they share a device."""
    if config.placement == "colocated":
        both = {f"{name} (trainer)": size for name, size in plan.trainer.parts.items()}
        both |= {f"{name} (rollout)": size for name, size in plan.rollout.parts.items()}
        return [("trainer rank and rollout worker", Footprint(both))]
    return [("trainer rank", plan.trainer), ("rollout worker", plan.rollout)]


def verdict(plan: MemoryPlan, config: Config, device_gib: float) -> list[str]:
    """What fits devices of `device_gib`, and what to change where something does not."""
    count = config.trainer.num_workers
    if config.placement != "colocated":
        count += config.rollout.num_workers
    sentences = []
    for title, footprint in processes(plan, config):
        left = device_gib - footprint.total / GIB
        if left >= 0:
            sentences.append(f"a {title} fits a device of {device_gib:g} GiB, {left:.1f} GiB left")
        else:
            sentences.append(
                f"a {title} does not fit {device_gib:g} GiB, {-left:.1f} GiB are missing: {_advice(title, config)}"
            )
    return [*sentences, f"the run takes {count} devices"]


def _advice(title: str, config: Config) -> str:
    if title == "rollout worker":
        resident = [] if config.rollout.text_encoder == "offload" else ["rollout.text_encoder=offload"]
        return ", ".join([*resident, "a smaller rollout.batch_size", "a smaller lora.rank"])
    trainer = config.trainer
    options = [] if trainer.gradient_checkpointing else ["trainer.gradient_checkpointing=true"]
    options += ["a smaller trainer.micro_batch_size"]
    options += ["trainer.shard=full"] if trainer.num_workers > 1 and trainer.shard != "full" else []
    options += ["more trainer.num_workers"] if trainer.shard != "none" else []
    options += [] if trainer.cpu_offload else ["trainer.cpu_offload=true"]
    return ", ".join(options)


def as_json(plan: MemoryPlan, config: Config, device_gib: float) -> dict[str, Any]:
    """All sizes in bytes."""
    parts = {
        title.replace(" ", "_"): {**footprint.parts, "total": footprint.total}
        for title, footprint in processes(plan, config)
    }
    return {
        "base_parameters": plan.model.base_parameters,
        "adapter_parameters": plan.model.adapter_parameters,
        **parts,
        "host": plan.host,
        "ticket_bytes": plan.ticket_bytes,
        "payload": plan.payload,
        "adapter_bytes": plan.adapter_bytes,
        "fits": all(footprint.total <= device_gib * GIB for _, footprint in processes(plan, config)),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan --memory", description="What a configuration needs, and whether it fits."
    )
    parser.add_argument("--config-name", default=DEFAULT, help=f"as of async_flowrl.main (default {DEFAULT})")
    parser.add_argument("--device", type=float, default=79.0, metavar="GIB", help="memory of a device (default 79)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = compose_config(given.config_name, given.overrides)
        check(config)
        plan = plan_memory(config, round(given.device * GIB))
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps(as_json(plan, config, given.device), indent=2) + "\n")
    else:
        sys.stdout.write(describe(plan, config, given.device))
    return 0
