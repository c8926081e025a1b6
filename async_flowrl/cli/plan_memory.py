"""async-flowrl plan --memory: the memory plan of a configuration as text or as JSON."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from async_flowrl.cli.cards import gib_of
from async_flowrl.cli.options import gigabytes
from async_flowrl.config.check import check, toy_values
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.resolution import in_pixels, sized
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import describe_gpus, gpus_taken, judged, processes
from async_flowrl.memory.footprints import GIB, MemoryPlan, plan_memory
from async_flowrl.memory.model_sizes import at_largest
from async_flowrl.memory.trainer_layout import LAYOUT, resolved_on
from separation.text_table import format_table


def describe(plan: MemoryPlan, config: Config, device_gib: float) -> str:
    model, size = plan.model, in_pixels(sized(config.rollout, config.rollout.resolution))
    title = (
        f"{config.model.path}: {model.base_parameters / 1e9:.2f} B parameters in {model.blocks} blocks, "
        f"{model.adapter_parameters / 1e6:.1f} M trained, at {size}"
    )
    verdicts = [judged(process, config, round(device_gib * GIB)) for process in processes(config)]
    sizes = {
        "host memory of a trainer rank, at most": plan.host,
        "host memory copied by a trainer rank for a checkpoint": plan.snapshot,
        "host memory with versions of a rollout worker": plan.ring,
        "version": model.version_bytes,
        "ticket": plan.ticket_bytes,
        "object store, at most": plan.payload,
        "of it weights on their way to rollout workers": plan.sent_weights,
    }
    table = format_table(("also", "GB"), [(name, f"{size / 1e9:.3f}") for name, size in sizes.items()])
    return "\n".join([title, "", *verdicts, "", table, "", describe_gpus(config)]) + "\n"


def all_fit(config: Config, device_gib: float) -> bool:
    return all(process.footprint.total <= process.available(round(device_gib * GIB)) for process in processes(config))


def as_json(plan: MemoryPlan, config: Config, device_gib: float) -> dict[str, Any]:
    parts = {
        process.title.replace(" ", "_"): {**process.footprint.parts, "total": process.footprint.total}
        for process in processes(config)
    }
    sizes = {name: size for name, size in vars(plan).items() if isinstance(size, int)}
    return {
        "base_parameters": plan.model.base_parameters,
        "adapter_parameters": plan.model.adapter_parameters,
        **parts,
        **sizes,
        "resolution": config.rollout.resolution,
        "adapter_bytes": plan.model.version_bytes,
        "devices": gpus_taken(config),
        "fits": all_fit(config, device_gib),
    }


def configured(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    parser.add_argument("--config-name", default=DEFAULT, help=f"as of async_flowrl.main (default {DEFAULT})")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    config = compose_config(options.config_name, options.overrides)
    check(config)
    return options, config


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="async-flowrl plan --memory", description="What a configuration needs, and whether it fits."
    )
    parser.add_argument("--device", type=gigabytes, default=80, metavar="GB", help="as the card is sold (default 80)")
    options, config = configured(parser, arguments)
    gib = gib_of(options.device)
    config, reason = resolved_on(at_largest(config), round(gib * GIB))
    plan = plan_memory(config)
    if options.json:
        printed = as_json(plan, config, gib) | {"layout": {key: getattr(config.trainer, key) for key in LAYOUT}}
        sys.stdout.write(json.dumps(printed, indent=2) + "\n")
    else:
        notes = "".join(f"{sentence}\n" for sentence in filter(None, (reason, toy_values(config))))
        sys.stdout.write(describe(plan, config, gib) + notes + typed(options, config, gib))


def typed(options: argparse.Namespace, config: Config, gib: float) -> str:
    if all_fit(config, gib):
        return f"type  async-flowrl train --config-name {options.config_name} {shlex.join(options.overrides)}\n"
    words = [override.removeprefix("experiment=") for override in options.overrides]
    cards = f"{max(1, math.ceil(gpus_taken(config)))}x{options.device:g}"
    return f"type  async-flowrl plan --fit --cards {cards} {shlex.join(words)}\n"
