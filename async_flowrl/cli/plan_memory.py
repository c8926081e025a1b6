"""async-flowrl plan --memory: the memory plan of a configuration as text or as JSON."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from async_flowrl.cli.cards import GIB_OF_GB
from async_flowrl.config.check import check, toy_values
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.resolution import in_pixels, parse_resolution
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import describe_gpus, enough_gpus, gpus_taken, processes, remedy, seat_for
from async_flowrl.memory.footprints import GIB, MARGIN_SHARE, RUNTIME_BYTES, MemoryPlan, Process, plan_memory
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.trainer_layout import AUTO, Chosen, on_devices, resolved
from separation.text_table import format_table


def describe(plan: MemoryPlan, config: Config, device_gib: float) -> str:
    """Returns the plan as text: a table per kind of process, and whether each fits (GiB: 2**30 bytes; GB: 10**9)."""
    model = plan.model
    whole = f"{config.model.path}: {model.base_parameters / 1e9:.2f} B parameters in {model.blocks} blocks"
    what = "full weights: {} M trained" if model.full else "LoRA of {} M parameters"
    trained = f"{what.format(f'{model.adapter_parameters / 1e6:.1f}')}, {model.version_bytes / 1e6:.0f} MB per version"
    sections = [f"{whole}, {trained}", f"images of {in_pixels(parse_resolution(config.rollout.resolution))}", ""]
    for process in processes(config):
        title, footprint = process.title, process.footprint
        rows = [(name, f"{size / GIB:.2f}") for name, size in footprint.parts.items()]
        extra = footprint.total - sum(footprint.parts.values())
        rows.append((f"margin {MARGIN_SHARE:.0%} and {RUNTIME_BYTES / GIB:.1f} of runtime", f"{extra / GIB:.2f}"))
        rows.append(("together", f"{footprint.total / GIB:.2f}"))
        sections += [format_table((title, "GiB"), rows), ""]
    if host := on_the_host(plan, config):
        sections += [*host, ""]
    payload = (
        f"{plan.ticket_bytes / 1e6:.1f} MB per ticket, at most {plan.payload / 1e9:.2f} GB in the object store, "
        f"{plan.sent_weights / 1e9:.2f} of them weights on their way to rollout workers"
    )
    verdicts = [judged(process, config, device_gib) for process in processes(config)]
    return "\n".join([*sections, payload, *verdicts, describe_gpus(config)]) + "\n"


def on_the_host(plan: MemoryPlan, config: Config) -> list[str]:
    """Returns a sentence on each use of host memory; none for the few bytes of a LoRA."""
    if not plan.model.full:
        base = f"each trainer rank also pins {plan.host / GIB:.1f} GiB of host memory for its share of the base"
        return [base] if plan.host else []
    who = "each trainer rank" if config.in_shares else "the first trainer rank"
    ring = (
        f"each rollout worker keeps its versions in {plan.ring / GIB:.1f} GiB of host memory, pinned where it has a GPU"
    )
    return [
        f"the first trainer rank also pins {plan.host / GIB:.1f} GiB of host memory for versions to be sent",
        f"{who} copies {plan.snapshot / GIB:.1f} GiB to host memory for each checkpoint, until it is written",
        *([ring] if plan.ring else []),
    ]


def judged(process: Process, config: Config, device_gib: float) -> str:
    """Returns a sentence on whether the process fits, and if not, on settings that help."""
    footprint, device = process.footprint, round(device_gib * GIB)
    available = process.available(device)
    part = "" if process.share >= 1 else f"{process.share:g} of "
    left = (available - footprint.total) / GIB
    if not footprint.parts:
        return (
            f"whether a {process.title} fits {part}{device_gib:g} GiB is unknown: its rewards do not say what they take"
        )
    if left >= 0:
        return f"a {process.title} fits {part}a device of {device_gib:g} GiB, {left:.1f} GiB left{process.caveat}"
    lacks = f"a {process.title} does not fit {part}{device_gib:g} GiB, {-left:.1f} GiB are missing"
    if process.key:
        return f"{lacks}: {seat_for(process, device)}{process.caveat}"
    larger = f"a device of {math.ceil(footprint.total * device / available / GIB)} GiB"
    if footprint.total <= device:
        larger = f"{enough_gpus(footprint.total, device):g} of the device"
    lasting = footprint.resident > available
    return f"{lacks}: {remedy(process, config, device, lasting=lasting)}, or with {larger}"


def all_fit(config: Config, device_gib: float) -> bool:
    return all(process.footprint.total <= process.available(round(device_gib * GIB)) for process in processes(config))


def as_json(plan: MemoryPlan, config: Config, device_gib: float) -> dict[str, Any]:
    parts = {
        process.title.replace(" ", "_"): {**process.footprint.parts, "total": process.footprint.total}
        for process in processes(config)
    }
    return {
        "base_parameters": plan.model.base_parameters,
        "adapter_parameters": plan.model.adapter_parameters,
        **parts,
        "host": plan.host,
        "ring": plan.ring,
        "snapshot": plan.snapshot,
        "resolution": config.rollout.resolution,
        "ticket_bytes": plan.ticket_bytes,
        "payload": plan.payload,
        "sent_weights": plan.sent_weights,
        "adapter_bytes": plan.model.version_bytes,
        "devices": gpus_taken(config),
        "fits": all_fit(config, device_gib),
    }


def cheapest_layout(config: Config, device_bytes: int) -> Chosen:
    """Returns the layout that would be chosen if `shard` and `gradient_checkpointing` were both `auto`."""
    free = replace(config.trainer, shard="auto", shard_size=None, gradient_checkpointing="auto")
    return resolved(replace(config, trainer=free), on_devices(config, device_bytes))


def recommended(config: Config, cheapest: Chosen, chosen: Chosen) -> list[str]:
    """Returns a sentence on the cheapest layout that fits, if the configuration names another one, else none."""
    one, other = cheapest.layout, chosen.layout
    held_alike = config.trainer.num_workers == 1 or one.shard in (AUTO, other.shard)
    if held_alike and one.gradient_checkpointing == other.gradient_checkpointing:
        return []
    return [f"auto would choose {sentence.replace('=auto is', '')}" for sentence in cheapest.reasons]


def configured(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """Parses a command line with a configuration; returns it and the checked configuration. Raises ValueError."""
    parser.add_argument("--config-name", default=DEFAULT, help=f"as of async_flowrl.main (default {DEFAULT})")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    config = compose_config(options.config_name, options.overrides)
    check(config)
    return options, config


def main(arguments: Sequence[str]) -> None:
    """Prints the plan. Raises ValueError if there is none."""
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --memory", description="What a configuration needs, and whether it fits."
    )
    parser.add_argument("--device", type=float, default=80, metavar="GB", help="a card sold with so many (default 80)")
    options, config = configured(parser, arguments)
    gib = round(options.device * GIB_OF_GB, 1)
    config, device = at_largest(config), round(gib * GIB)
    chosen, cheapest = resolved(config, on_devices(config, device)), cheapest_layout(config, device)
    config = chosen.applied(config)
    plan = plan_memory(config)
    if options.json:
        printed = as_json(plan, config, gib)
        printed |= {"layout": asdict(chosen.layout), "cheapest_layout": asdict(cheapest.layout)}
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    else:
        sentences = [*(chosen.reasons or recommended(config, cheapest, chosen)), *filter(None, [toy_values(config)])]
        notes = "".join(f"{sentence}\n" for sentence in sentences)
        sys.stdout.write(describe(plan, config, gib) + notes + typed(options, config, gib))


def typed(options: argparse.Namespace, config: Config, gib: float) -> str:
    if all_fit(config, gib):
        return f"type  async-flowrl train --config-name {options.config_name} {shlex.join(options.overrides)}\n"
    words = [override.removeprefix("experiment=") for override in options.overrides]
    cards = f"{max(1, math.ceil(gpus_taken(config)))}x{options.device:g}"
    return f"type  async-flowrl plan --fit --cards {cards} {shlex.join(words)}\n"
