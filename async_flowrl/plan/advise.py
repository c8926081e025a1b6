"""Recommendation for a run: the split of devices, `max_staleness`, `hand_over`, and whether to run asynchronously.

`advise` is the entry point, called by `plan/command.py`; every candidate is simulated.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_flowrl.plan.finer import finer_tickets
from async_flowrl.plan.rewards import cures, limit_sentence, with_workers
from async_flowrl.plan.simulate import Prediction, simulate
from async_flowrl.plan.work import HAND_OVERS, Layout, Work, balance, bounds

ENOUGH_EFFICIENCY = 0.98
"""Efficiency (share of the bound) that is enough: a layout that reaches it gains too little from more staleness."""
MIN_SPEEDUP = 1.02
"""Speed-up over colocated training on the same devices below which separate pools are not recommended."""
MIN_DEVICE_USE = 0.95
"""Share of the devices; if the best split uses less, the advice says so."""
MAX_STALENESS = 8
"""Largest `max_staleness` that is simulated."""
MAX_ADVISED_STALENESS = 2
"""Largest `max_staleness` that is recommended; larger ones only appear in the table."""
TICKETS_PER_SIMULATION = 1000
"""Approximate number of tickets per simulation; they take a few tenths of a second."""
MAX_SPLITS = 8
"""Number of splits that are simulated: those with the best bound."""
CLUSTER_CPU_SECONDS = 0.03
"""CPU seconds per step of the driver, the reward worker and Ray's own processes on one machine (docs/benchmarks.md)."""
NOTABLE_CLUSTER_SHARE = 0.05
"""Share of a step above which that cost is pointed out."""


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
    colocated: Prediction | None
    """Both pools on all devices; recommended if `chosen` is not enough faster. None if it does not fit the devices."""
    sentences: tuple[str, ...]
    """The advice in sentences."""


@dataclass(frozen=True)
class Limits:
    """Resources that a plan may use, and choices that are fixed."""

    devices: int
    """Devices for trainer and rollout; reward workers are not counted among them."""
    memory: float = math.inf
    """Bytes of object store for images and trajectories."""
    reward: int = 1
    """Workers of the shared reward pool; 0 if there is none."""
    own_rewards: Mapping[str, int] = field(default_factory=dict)
    """Pool name (`reward/X`) → workers, for pools that score a single reward term X."""
    reward_gpus: Mapping[str, float] = field(default_factory=dict)
    """Reward pool → GPUs per worker, in addition to `devices`."""
    split: tuple[int, int] | None = None
    """(rollout devices, trainer devices); None = search for the best split."""
    steps: int | None = None
    """Steps to simulate; None = enough for about TICKETS_PER_SIMULATION tickets."""
    slow: tuple[float, ...] = ()
    """Factors on the ticket durations of the first rollout workers."""
    colocate: bool = True
    """Whether both models fit one device, so that colocated training is possible."""
    backend: str = "ray"
    """`runtime.backend`: ray (processes) or local (threads of one process)."""


def advise(work: Work, limits: Limits) -> Advice:
    """Searches the best split at `max_staleness` 1, then the best `max_staleness` and `hand_over` at that split."""
    colocated = predict_colocated(work, limits) if limits.colocate else None
    candidates = splits(work, limits)
    if not candidates:
        return Advice((), (), None, colocated, (no_split(limits),))
    depths = search_staleness(work, fastest(work, candidates, limits), limits)
    chosen = choose(depths, limits)
    if chosen is None:
        tried = [_simulate(work, layout, limits) for layout in candidates]
        return Advice(tuple(tried), tuple(depths), None, colocated, (no_memory(depths, limits),))
    how = chosen.layout.max_staleness, chosen.layout.hand_over
    tried = [_simulate(work, layout.with_staleness(*how), limits) for layout in candidates]
    tried.sort(key=lambda prediction: prediction.layout.rollout)
    advice = Advice(tuple(tried), tuple(depths), chosen, colocated, ())
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
    best = _simulate(work, candidates[0], limits)
    for layout in candidates[1:]:
        if bounds(work, layout).overlapped >= best.step_seconds:
            break
        best = min(best, _simulate(work, layout, limits), key=lambda prediction: prediction.step_seconds)
    return best.layout


def search_staleness(work: Work, layout: Layout, limits: Limits) -> list[Prediction]:
    """Simulates both values of `hand_over` for `max_staleness` 0, 1, 2 and so on, at most MAX_STALENESS.

    The search ends when exactly two values of `max_staleness`, the last of them at least 2, are efficient enough.
    """
    predictions: list[Prediction] = []
    enough = 0
    for k in range(MAX_STALENESS + 1):
        pair = [_simulate(work, layout.with_staleness(k, hand_over), limits) for hand_over in HAND_OVERS]
        predictions += pair
        enough += max(prediction.efficiency for prediction in pair) >= ENOUGH_EFFICIENCY
        if enough >= 2 and k >= 2:
            break
    return predictions


def choose(depths: Sequence[Prediction], limits: Limits) -> Prediction | None:
    """Returns the prediction with the least staleness among those efficient enough; None if none fits the store.

    If none is efficient enough, it is the one with the least staleness among those within 2 % of the fastest. The
    staleness is at most MAX_ADVISED_STALENESS: beyond that, smaller tickets help as much, with fresher images.
    """
    advised = [p for p in depths if p.layout.max_staleness <= MAX_ADVISED_STALENESS]
    fitting = [p for p in advised if p.payload_bytes <= limits.memory]
    if not fitting:
        return None
    fastest = min(p.step_seconds for p in fitting)
    good = [p for p in fitting if p.efficiency >= ENOUGH_EFFICIENCY] or [
        p for p in fitting if p.step_seconds <= fastest / ENOUGH_EFFICIENCY
    ]
    return min(good, key=lambda p: (p.layout.max_staleness, p.step_seconds))


def predict_colocated(work: Work, limits: Limits) -> Prediction:
    """Simulates colocated pools: in each step, all devices generate and then all devices train."""
    layout = Layout(limits.devices, limits.devices, limits.reward, 0, "batch", limits.slow, limits.own_rewards)
    # The change of the devices from one pool to the other costs `switch` once per step; the stage law carries it.
    return _simulate(replace(work, stage=work.stage.plus(work.switch)), layout, limits)


def explain(work: Work, limits: Limits, advice: Advice) -> list[str]:
    """Returns the advice in sentences, the most important first; empty if no layout was chosen."""
    chosen = advice.chosen
    if chosen is None:
        return []
    return [
        *on_rewards(work, chosen, limits),
        *against_colocated(chosen, advice.colocated, limits),
        recommendation(chosen, advice.colocated),
        *on_staleness(chosen, advice.depths),
        *on_tickets(work, chosen, limits),
        *on_balance(work, chosen, limits),
        *on_small_steps(chosen, limits),
    ]


def on_rewards(work: Work, chosen: Prediction, limits: Limits) -> list[str]:
    """Returns the sentence on reward pools that limit the speed, if any."""
    cure = cures(work, chosen.layout, chosen.bounds)
    if not cure:
        return []
    cured = _simulate(work, with_workers(chosen.layout, cure), limits)
    return [limit_sentence(work, chosen, cured, cure, limits.reward_gpus)]


def on_tickets(work: Work, chosen: Prediction, limits: Limits) -> list[str]:
    """Returns the sentence on smaller tickets, if they gain as much as more staleness would."""
    if chosen.layout.max_staleness < 2 and chosen.efficiency >= ENOUGH_EFFICIENCY:
        return []
    if cures(work, chosen.layout, chosen.bounds):
        return []
    finer = finer_tickets(work, chosen, lambda smaller, layout: _simulate(smaller, layout, limits))
    return [] if finer is None else [finer.sentence(chosen)]


def against_colocated(chosen: Prediction, colocated: Prediction | None, limits: Limits) -> list[str]:
    """Returns the comparison with colocated training, if that is possible."""
    if colocated is None:
        return []
    gain = colocated.step_seconds / chosen.step_seconds
    if not worth_it(chosen, colocated):
        return [
            f"Don't use async here: placement=colocated on the same {limits.devices} devices takes "
            f"{colocated.step_seconds:.3g} s per step, the best separate layout {chosen.step_seconds:.3g} s "
            f"({gain:.2f} x)."
        ]
    return [
        f"Worth it: {gain:.2f} x faster than placement=colocated on the same {limits.devices} devices "
        f"({colocated.step_seconds:.3g} s per step)."
    ]


def worth_it(chosen: Prediction, colocated: Prediction | None) -> bool:
    """Returns whether separate pools are enough faster than colocated ones, or colocated ones are not possible."""
    return colocated is None or colocated.step_seconds / chosen.step_seconds >= MIN_SPEEDUP


def recommendation(chosen: Prediction, colocated: Prediction | None) -> str:
    """Returns the sentence with the settings to use and the predicted step time."""
    layout = chosen.layout
    use = "Use" if worth_it(chosen, colocated) else "If the pools have to be separate:"
    return (
        f"{use} --config-name {layout.mode} rollout.num_workers={layout.rollout} trainer.num_workers={layout.trainer} "
        f"max_staleness={layout.max_staleness} hand_over={layout.hand_over}: {chosen.step_seconds:.3g} s per step, "
        f"{chosen.efficiency:.1%} of the bound."
    )


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
    generation = work.tickets_per_step * work.generate.mean
    update = work.prompts_per_step * work.update.mean
    used = balance(generation, update, limits.devices) if limits.devices > 1 and generation + update > 0 else 1.0
    if used < MIN_DEVICE_USE:
        sentences.append(
            f"Whole devices cost {1 - used:.0%}: generation and training take {generation:.3g} and {update:.3g} "
            f"device-seconds per step, which {limits.devices} devices cannot share evenly."
        )
    return sentences


def on_small_steps(chosen: Prediction, limits: Limits) -> list[str]:
    """What Ray's processes cost where all pools share the cores of one machine, if a step is short enough to notice."""
    share = CLUSTER_CPU_SECONDS / chosen.step_seconds if chosen.step_seconds > 0 else 0.0
    if limits.backend != "ray" or share < NOTABLE_CLUSTER_SHARE:
        return []
    return [
        f"On one machine without GPUs, driver, reward worker and Ray take about {1000 * CLUSTER_CPU_SECONDS:.0f} ms of "
        f"CPU per step beside the pools, {share:.0%} of this step: runtime.backend=local has the same weights without "
        "these processes."
    ]


def no_split(limits: Limits) -> str:
    return f"Don't use async here: separate pools need at least 2 devices, got {limits.devices}; use sync colocated."


def no_memory(depths: Sequence[Prediction], limits: Limits) -> str:
    min_bytes = min(p.payload_bytes for p in depths)
    return (
        f"Even without staleness {min_bytes / 2**30:.3g} GiB of images and trajectories wait to be trained, more than "
        f"the {limits.memory / 2**30:.3g} GiB of object store: fewer prompts per step or a smaller window are needed."
    )


def _simulate(work: Work, layout: Layout, limits: Limits) -> Prediction:
    min_steps = 16 + 2 * layout.max_staleness
    steps = limits.steps or max(min_steps, min(200, TICKETS_PER_SIMULATION // work.tickets_per_step))
    return simulate(work, layout, steps=steps)
