"""Table of one rehearsal on several cards: whether it fits, and the estimated seconds of a training step."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.plan.cards import CARDS, Card, Roofline, card_of
from async_flowrl.plan.estimate import estimate
from async_flowrl.plan.report import GIB, Rehearsal
from separation.table import format_table

ALL = "all"
HEAD = ("card", "fits", "ticket s", "micro-batch s", "generation s/step", "training s/step", "images/s", "longer")


def cards_of(names: str) -> list[Card]:
    """Returns the cards of a list of names with commas, or of `all`.

    Raises ValueError, with the nearest name, for an unknown one.
    """
    if names.lower() == ALL:
        return list(CARDS.values())
    try:
        return [card_of(name.strip()) for name in names.split(",")]
    except ValueError:
        wrong = next(name.strip() for name in names.split(",") if name.strip().upper() not in map(str.upper, CARDS))
        raise ValueError(unknown_name("--card", wrong, CARDS if "," in names else [*CARDS, ALL])) from None


def on(card: Card, done: Rehearsal) -> Rehearsal:
    """Returns the rehearsal with the estimate for another card; the counts are the same on every card."""
    roofline = Roofline(card, done.roofline.given)
    return replace(done, roofline=roofline, estimate=estimate(done.config, done.rank, done.rollout, roofline))


def lacking(done: Rehearsal) -> float:
    """Returns the most bytes by which a process exceeds the card's memory; 0 if all fit."""
    return max(0.0, *(phase.peak - done.roofline.card.memory for phase in done.peaks().values()))


def by_card(done: Rehearsal, cards: Sequence[Card]) -> str:
    """Returns a table with a row per card.

    For images per second a step takes the longer of generation and training, or both with `max_staleness=0` or
    `placement=shared`.
    """
    rows = [_row(on(card, done)) for card in cards]
    layout = f"the same processes on each card; the base is held as on {done.roofline.card.name} ({done.rank.layout})"
    return f"By card, estimated by arithmetic ({layout}):\n{format_table(HEAD, rows)}\n"


def as_json(done: Rehearsal, cards: Sequence[Card]) -> list[dict[str, Any]]:
    """Returns, for each card, whether the processes fit, and the estimate in seconds."""
    on_cards = [on(card, done) for card in cards]
    return [
        {"card": asdict(each.roofline.card), "fits": not lacking(each), "estimate": asdict(each.estimate)}
        for each in on_cards
    ]


def _row(done: Rehearsal) -> tuple[str, ...]:
    estimated, config, missing = done.estimate, done.config, lacking(done)
    one_after_the_other = config.max_staleness == 0 or done.shared
    step = (sum if one_after_the_other else max)((estimated.generation, estimated.update))
    return (
        done.roofline.card.name,
        f"no, {missing / GIB:.1f} GiB are missing" if missing else "yes",
        f"{estimated.ticket:.3g}",
        f"{estimated.micro_batch:.3g}",
        f"{estimated.generation:.3g}",
        f"{estimated.update:.3g}",
        f"{config.prompts_per_step * config.group_size / step:.3g}",
        "training" if estimated.update > estimated.generation else "generation",
    )
