"""One rehearsal on several cards: what fits, and the seconds of a training step by arithmetic, a row per card."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.plan.rehearsal.cards import CARDS, Card, Roofline, card_of
from async_flowrl.plan.rehearsal.estimate import estimate
from async_flowrl.plan.rehearsal.report import GIB, Rehearsal
from separation.table import format_table

ALL = "all"
HEAD = ("card", "fits", "ticket s", "micro-batch s", "generation s/step", "training s/step", "images/s", "longer")


def cards_of(names: str) -> list[Card]:
    """Cards by their names with commas between them, or `all`. Raises ValueError with the nearest name."""
    if names.lower() == ALL:
        return list(CARDS.values())
    try:
        return [card_of(name.strip()) for name in names.split(",")]
    except ValueError:
        wrong = next(name.strip() for name in names.split(",") if name.strip().upper() not in map(str.upper, CARDS))
        raise ValueError(unknown_name("--card", wrong, CARDS if "," in names else [*CARDS, ALL])) from None


def on(card: Card, done: Rehearsal) -> Rehearsal:
    """The same process with another card's arithmetic: what was rehearsed does not change with the card."""
    roofline = Roofline(card, done.roofline.given)
    return replace(done, roofline=roofline, estimate=estimate(done.config, done.rank, done.rollout, roofline))


def lacking(done: Rehearsal) -> float:
    """Bytes of which a process needs more than its card has; 0 where everything fits."""
    return max(0.0, *(phase.peak - done.roofline.card.memory for phase in done.peaks().values()))


def by_card(done: Rehearsal, cards: Sequence[Card]) -> str:
    """A table with a row per card. Images per second are those of a step that is as long as its longer phase, or, with
    `max_staleness=0`, as both together."""
    rows = [_row(on(card, done)) for card in cards]
    layout = f"the same processes on each card; the base is held as on {done.roofline.card.name} ({done.rank.layout})"
    return f"By card, estimated by arithmetic ({layout}):\n{format_table(HEAD, rows)}\n"


def as_json(done: Rehearsal, cards: Sequence[Card]) -> list[dict[str, Any]]:
    """Per card whether it fits and the estimate, in seconds."""
    found = [on(card, done) for card in cards]
    return [
        {"card": asdict(each.roofline.card), "fits": not lacking(each), "estimate": asdict(each.estimate)}
        for each in found
    ]


def _row(done: Rehearsal) -> tuple[str, ...]:
    found, config, missing = done.estimate, done.config, lacking(done)
    step = (sum if config.max_staleness == 0 else max)((found.generation, found.update))
    return (
        done.roofline.card.name,
        f"no, {missing / GIB:.1f} GiB are missing" if missing else "yes",
        f"{found.ticket:.3g}",
        f"{found.micro_batch:.3g}",
        f"{found.generation:.3g}",
        f"{found.update:.3g}",
        f"{config.prompts_per_step * config.group_size / step:.3g}",
        "training" if found.update > found.generation else "generation",
    )
