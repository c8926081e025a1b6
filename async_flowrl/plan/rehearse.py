"""Command `python -m async_flowrl.plan --rehearse`: runs a configuration's workers on fake tensors.

Fake tensors have shapes and dtypes but no values. `rehearse` returns a `Rehearsal`: memory, FLOPs, collectives and
estimated seconds of a trainer rank and of a rollout worker.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import DEFAULT, compose_config
from async_flowrl.config.quiet import quieter
from async_flowrl.config.schema import Config
from async_flowrl.memory.largest import at_largest
from async_flowrl.memory.layout import on_devices, resolved
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.whole import whole_rank, whole_rollout
from async_flowrl.plan import by_card
from async_flowrl.plan.cards import CARDS, Card, Roofline
from async_flowrl.plan.estimate import estimate
from async_flowrl.plan.report import Rehearsal, as_json, describe
from async_flowrl.tickets.arithmetic import check_batching


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
    rank, rollout = whole_rank(config, model), whole_rollout(config, model)
    return Rehearsal(config, roofline, rank, rollout, estimate(config, rank, rollout, roofline))


def main(arguments: Sequence[str]) -> int:
    """Prints the rehearsal; returns the exit code, 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan --rehearse",
        description="Runs a configuration's trainer and rollout worker on shapes alone: memory, collectives, FLOPs.",
    )
    parser.add_argument("--config-name", default=DEFAULT, help=f"as of async_flowrl.main (default {DEFAULT})")
    parser.add_argument(
        "--card",
        default="H100",
        metavar="NAME[,NAME…]",
        help=f"of {', '.join(CARDS)}, or all (default H100); of several, the first one's memory is planned for",
    )
    parser.add_argument("--json", action="store_true", help="print the rehearsal as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    try:
        cards = by_card.cards_of(given.card)
        config = compose_config(given.config_name, given.overrides)
        check(config)
        # The package's warnings are about values, and fake tensors have none.
        with quieter("async_flowrl", logging.ERROR):
            done = rehearse(config, cards[0])
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    except MemoryError as error:  # the bytes of a version are real host memory in a rehearsal too
        sys.stderr.write(f"plan: this machine has too little memory for the rehearsal: {error}\n")
        return 2
    if given.json:
        sys.stdout.write(json.dumps({**as_json(done), "by_card": by_card.as_json(done, cards)}, indent=2) + "\n")
    else:
        sys.stdout.write(describe(done) + (f"\n{by_card.by_card(done, cards)}" if len(cards) > 1 else ""))
    return 0
