"""Recommendation for a run: the split of devices, `max_staleness`, `hand_over`, and whether to run asynchronously.

`advise` is the entry point, called by `plan/command.py`; every candidate is simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_flowrl.plan.finer import finer_tickets
from async_flowrl.plan.limits import ENOUGH_EFFICIENCY, Limits, choose, simulated
from async_flowrl.plan.placements import (
    Placements,
    compare_placements,
    on_overlap,
    on_placement,
    recommendation,
    settings,
)
from async_flowrl.plan.rewards import cures, limit_sentence, with_workers
from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import HAND_OVERS, Layout, Work, balance, bounds
from async_flowrl.tickets.ticket import EVALUATION_EVERY_TICKETS

MIN_DEVICE_USE = 0.95
"""Share of the devices; if the best split uses less, the advice says so."""
MAX_STALENESS = 8
"""Largest `max_staleness` that is simulated."""
MAX_SPLITS = 8
"""Number of splits that are simulated: those with the best bound."""
NOTABLE_FRAME_SHARE = 0.05
"""Share of the cores' time from which the frame's part of it is pointed out."""


@dataclass(frozen=True)
class Advice:
    """Result of the search: everything that the prediction command prints."""

    splits: tuple[Prediction, ...]
    """Simulated splits with the `max_staleness` and `hand_over` of `chosen`, sorted by rollout devices.

    If nothing was chosen, they have `max_staleness` 1 and are sorted by their bound.
    """
    depths: tuple[Prediction, ...]
    """Every `max_staleness` and `hand_over` that was simulated at the best split."""
    chosen: Prediction | None
    """Best layout with separate pools; None if there are too few devices or too little object store."""
    placements: Placements
    """`chosen` beside the other placements on as many devices."""
    sentences: tuple[str, ...]
    """The advice in sentences."""


def advise(work: Work, limits: Limits) -> Advice:
    """Searches the best split at `max_staleness` 1, then the best `max_staleness` and `hand_over` at that split."""
    candidates = splits(work, limits)
    if not candidates:
        placements = compare_placements(work, None, limits)
        sentences = [*on_overlap(placements, limits.devices), *recommendation(placements)]
        if placements.best is not None:
            sentences += on_small_steps(placements.best, limits) + on_evaluations(work, placements.best)
        return Advice((), (), None, placements, tuple(sentences))
    depths = search_staleness(work, fastest(work, candidates, limits), limits)
    chosen = choose(depths, limits)
    placements = compare_placements(work, chosen, limits)
    if chosen is None:
        tried = [simulated(work, layout, limits) for layout in candidates]
        return Advice(tuple(tried), tuple(depths), None, placements, (no_memory(depths, limits),))
    how = chosen.layout.max_staleness, chosen.layout.hand_over
    tried = [simulated(work, layout.with_staleness(*how), limits) for layout in candidates]
    tried.sort(key=lambda prediction: prediction.layout.rollout)
    advice = Advice(tuple(tried), tuple(depths), chosen, placements, ())
    return replace(advice, sentences=tuple(explain(work, limits, advice)))


def splits(work: Work, limits: Limits) -> list[Layout]:
    """Returns up to MAX_SPLITS layouts, best bound first; empty with a single device and no fixed split."""
    every = [(n, limits.devices - n) for n in range(1, limits.devices)]
    pairs = every if limits.split is None else [limits.split]
    common: dict[str, Any] = {"reward": limits.reward, "slow": limits.slow, "own_rewards": limits.own_rewards}
    layouts = [Layout(rollout, trainer, **common) for rollout, trainer in pairs]
    return sorted(layouts, key=lambda layout: bounds(work, layout).overlapped)[:MAX_SPLITS]


def fastest(work: Work, candidates: Sequence[Layout], limits: Limits) -> Layout:
    """Returns the layout with the fewest seconds per step; `candidates` are sorted by their bounds.

    No layout is faster than its bound, so the search ends at the first whose bound is not below the best until then.
    """
    best = simulated(work, candidates[0], limits)
    for layout in candidates[1:]:
        if bounds(work, layout).overlapped >= best.step_seconds:
            break
        best = min(best, simulated(work, layout, limits), key=lambda prediction: prediction.step_seconds)
    return best.layout


def search_staleness(work: Work, layout: Layout, limits: Limits) -> list[Prediction]:
    """Simulates both values of `hand_over` for `max_staleness` 0, 1, 2 and so on, at most MAX_STALENESS.

    The search ends when exactly two values of `max_staleness`, the last of them at least 2, are efficient enough.
    """
    predictions: list[Prediction] = []
    enough = 0
    for k in range(MAX_STALENESS + 1):
        pair = [simulated(work, layout.with_staleness(k, hand_over), limits) for hand_over in HAND_OVERS]
        predictions += pair
        enough += max(prediction.efficiency for prediction in pair) >= ENOUGH_EFFICIENCY
        if enough >= 2 and k >= 2:
            break
    return predictions


def explain(work: Work, limits: Limits, advice: Advice) -> list[str]:
    """Returns the advice in sentences, the most important first; empty if no layout was chosen."""
    chosen = advice.chosen
    if chosen is None:
        return []
    return [
        *on_rewards(work, chosen, limits),
        *on_overlap(advice.placements, limits.devices),
        *on_placement(advice.placements),
        *recommendation(advice.placements),
        *on_staleness(chosen, advice.depths),
        *on_tickets(work, chosen, limits),
        *on_balance(work, chosen, limits),
        *on_small_steps(advice.placements.best or chosen, limits),
        *on_evaluations(work, advice.placements.best or chosen),
    ]


def on_rewards(work: Work, chosen: Prediction, limits: Limits) -> list[str]:
    """Returns the sentence on reward pools that limit the speed, if any."""
    cure = cures(chosen.layout, chosen.bounds)
    if not cure:
        return []
    cured = simulated(work, with_workers(chosen.layout, cure), limits)
    return [limit_sentence(work, chosen, cured, cure, limits.reward_gpus)]


def on_tickets(work: Work, chosen: Prediction, limits: Limits) -> list[str]:
    """Returns the sentence on smaller tickets, if they gain as much as more staleness would."""
    if chosen.layout.max_staleness < 2 and chosen.efficiency >= ENOUGH_EFFICIENCY:
        return []
    if cures(chosen.layout, chosen.bounds):
        return []
    finer = finer_tickets(work, chosen, lambda smaller, layout: simulated(smaller, layout, limits))
    return [] if finer is None else [finer.sentence(chosen)]


def on_staleness(chosen: Prediction, depths: Sequence[Prediction]) -> list[str]:
    """Returns sentences on what more staleness would gain."""
    k = chosen.layout.max_staleness
    deeper = [p.step_seconds for p in depths if p.layout.max_staleness > k]
    sentences = []
    if max(p.efficiency for p in depths) < ENOUGH_EFFICIENCY:
        sentences.append(
            f"No max_staleness up to {max(p.layout.max_staleness for p in depths)} reaches {ENOUGH_EFFICIENCY:.0%} of "
            "the bound: generation or rewards are too uneven for this many tickets per worker."
        )
    if deeper and min(deeper) > chosen.step_seconds * ENOUGH_EFFICIENCY:
        limiter = "the trainer" if chosen.bounds.update >= chosen.bounds.generation else "generation"
        sentences.append(
            f"More max_staleness than {k} is pure staleness: {limiter} is the limit, and the best deeper pipeline "
            f"gains {max(0.0, chosen.step_seconds / min(deeper) - 1):.1%}."
        )
    return sentences


def on_balance(work: Work, chosen: Prediction, limits: Limits) -> list[str]:
    """Returns the sentence on devices that no whole-number split can use, if they are many."""
    sentences = []
    generation = work.generation_seconds
    update = work.prompts_per_step * work.update.mean
    used = balance(generation, update, limits.devices) if limits.devices > 1 and generation + update > 0 else 1.0
    if used < MIN_DEVICE_USE:
        sentences.append(
            f"Whole devices cost {1 - used:.0%}: generation and training take {generation:.3g} and {update:.3g} "
            f"device-seconds per step, which {limits.devices} devices cannot share evenly."
        )
    return sentences


def on_small_steps(best: Prediction, limits: Limits) -> list[str]:
    """Returns the sentences on the CPU time of the frame, if it is a notable share of the time of the cores."""
    seconds, cores = best.step_seconds, limits.cores
    if cores is None or not best.frame_seconds or best.frame_seconds < NOTABLE_FRAME_SHARE * cores * seconds:
        return []
    said = (
        f"At steps of {seconds:.2g} s on {cores} core{'' if cores == 1 else 's'} use {settings(best.layout)}: driver, "
        f"reward worker and Ray take {1000 * best.frame_seconds:.0f} ms of CPU per step beside the pools, "
        f"{best.frame_seconds / (cores * seconds):.0%} of the cores' time, which is in these figures."
    )
    if best.layout.trainer > 1:
        return [said]
    return [said, "runtime.backend=local has the same weights without these processes."]


def on_evaluations(work: Work, best: Prediction) -> list[str]:
    """Returns the sentence on the time that an evaluation takes beside the training; empty without evaluations."""
    planned = work.evaluation
    if planned is None:
        return []
    what = f"Evaluations of {planned.tickets} tickets, every {planned.every} steps,"
    if not best.evaluations:
        return [f"{what} are later than the simulated steps, so these figures lack them: use --steps."]
    longest, between = max(best.evaluations), planned.every * best.step_seconds
    if longest > between:
        return [
            f"{what} fall behind: one takes up to {longest:.3g} s, and the next is due after {between:.3g} s. At most "
            f"one ticket in {EVALUATION_EVERY_TICKETS} is of an evaluation as long as a worker has others to make."
        ]
    return [f"{what} are in these figures; one takes up to {longest:.3g} s, beside the training."]


def no_memory(depths: Sequence[Prediction], limits: Limits) -> str:
    """Returns the sentence for a step whose images and trajectories the object store cannot hold with any staleness."""
    min_bytes = min(p.payload_bytes for p in depths)
    return (
        f"Even without staleness {min_bytes / 2**30:.3g} GiB of images and trajectories wait to be trained, more than "
        f"the {limits.memory / 2**30:.3g} GiB of object store: fewer prompts per step or a smaller window are needed."
    )
