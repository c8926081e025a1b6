"""Comparison of placements by step time: separate rollout and trainer pools, or one pool that does both (shared).

Both have the same number of devices. Phases *overlap* if some images are generated while others are trained on. They
are *in turn* if all devices first generate a step's images and then train on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from async_flowrl.config.shared import SHARED
from async_flowrl.plan.limits import Limits, choose, simulated
from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import SEPARATE, Layout, Work

MIN_SPEEDUP = 1.02
"""Speed-up from which phases overlap rather than take turns, and from which one pool is preferred to two."""
NO_LAYOUT = "Nothing fits: separate pools need at least 2 devices, and one base with both adapters does not fit one."
"""Advice where a single device cannot hold a process that samples and trains."""
SHARED_DEPTHS = ((0, "batch"), (0, "stream"), (1, "stream"), (2, "stream"))
"""Pairs (max_staleness, hand_over) that are simulated for a shared pool."""


@dataclass(frozen=True)
class Placements:
    """The best layout of each placement; a placement that is not possible has None."""

    separate: Prediction | None
    shared: tuple[Prediction, ...]
    """One prediction for each of SHARED_DEPTHS; empty if a shared pool is not possible."""
    one_pool: Prediction | None
    """The prediction of `shared` that is recommended."""
    shared_overlap: Prediction | None
    """The recommended one among the predictions of `shared` whose phases overlap."""

    @property
    def in_turn(self) -> Prediction | None:
        """Recommended prediction whose phases are in turn, so that all samples are of the trained version."""
        return _preferred([p for p in self.shared if _is_in_turn(p)])

    @property
    def overlapping(self) -> Prediction | None:
        """Recommended prediction whose phases overlap: separate pools, unless a shared pool is faster."""
        return _preferred([*_there(self.separate), *_there(self.shared_overlap)])

    @property
    def best(self) -> Prediction | None:
        """Recommended prediction of all: phases in turn, unless overlap gains enough."""
        return _preferred([*_there(self.in_turn), *_there(self.overlapping)])


def compare_placements(work: Work, separate: Prediction | None, limits: Limits) -> Placements:
    """Simulates the placements that the limits allow; `separate` is the best layout of two pools."""
    shared = [simulated(work, _shared(limits, *how), limits) for how in SHARED_DEPTHS] if limits.share else []
    overlapping = [p for p in shared if not _is_in_turn(p)]
    one_pool, shared_overlap = (choose(each, limits) if each else None for each in (shared, overlapping))
    return Placements(separate, tuple(shared), one_pool, shared_overlap)


def _shared(limits: Limits, max_staleness: int, hand_over: str) -> Layout:
    n = limits.devices
    return Layout(n, n, limits.reward, max_staleness, hand_over, limits.slow, limits.own_rewards, placement=SHARED)


def settings(layout: Layout) -> str:
    """Returns the command-line settings of this layout."""
    placed = "" if layout.placement == SEPARATE else f"placement={layout.placement} "
    return (
        f"--config-name {layout.mode} {placed}rollout.num_workers={layout.rollout} "
        f"trainer.num_workers={layout.trainer} max_staleness={layout.max_staleness} hand_over={layout.hand_over}"
    )


def worth_it(placements: Placements) -> bool:
    """Returns True if a layout whose phases overlap is recommended."""
    best = placements.best
    return best is not None and best is placements.overlapping


def on_overlap(placements: Placements, devices: int) -> list[str]:
    """Returns the sentence that compares overlapping phases with phases in turn, on the same devices."""
    in_turn, other = placements.in_turn, placements.overlapping
    if in_turn is None:
        return [] if other is not None else [NO_LAYOUT]
    placed = f"{in_turn.layout.mode} placement={in_turn.layout.placement} on the same {_count(devices)}"
    if other is None or (placements.separate is None and not worth_it(placements)):
        return [f"Don't use async here: {_no_gain(in_turn)}."]
    gain = in_turn.step_seconds / other.step_seconds
    if not worth_it(placements):
        return [
            f"Don't use async here: {placed} takes {in_turn.step_seconds:.3g} s per step, the best "
            f"layout that overlaps them ({_in_words(other.layout)}) {other.step_seconds:.3g} s ({gain:.2f} x)."
        ]
    return [f"Worth it: {gain:.2f} x faster than {placed} ({in_turn.step_seconds:.3g} s per step)."]


def _no_gain(in_turn: Prediction) -> str:
    return (
        f"one device is busy {in_turn.efficiency:.1%} of the time without it, and separate pools need at least 2; "
        f"{in_turn.layout.mode} placement={in_turn.layout.placement} takes {in_turn.step_seconds:.3g} s per step"
    )


def on_placement(placements: Placements) -> list[str]:
    """Returns the sentence that compares a shared pool with the best two pools."""
    separate, shared = placements.separate, placements.one_pool
    if separate is None or shared is None:
        return []
    gain = separate.step_seconds / shared.step_seconds
    said = (
        f"placement=shared takes {shared.step_seconds:.3g} s per step (max_staleness={shared.layout.max_staleness}, "
        f"hand_over={shared.layout.hand_over}), the best two pools ({_in_words(separate.layout)}) "
        f"{separate.step_seconds:.3g} s"
    )
    if gain >= MIN_SPEEDUP:
        return [f"One pool that does both is {gain:.2f} x as fast as two: {said}."]
    return [f"Two pools are as fast as one that does both, or faster ({1 / gain:.2f} x): {said}."]


def recommendation(placements: Placements) -> list[str]:
    """Returns the sentence with the recommended settings and their step time.

    If these are not of separate pools, a second sentence has those of the best separate pools.
    """
    best, separate = placements.best, placements.separate
    said = [] if best is None else [f"Use {_settled(best)}."]
    if separate is not None and separate is not best:
        said.append(f"If the pools have to be separate: {_settled(separate)}.")
    return said


def _settled(prediction: Prediction) -> str:
    return (
        f"{settings(prediction.layout)}: {prediction.step_seconds:.3g} s per step, {prediction.efficiency:.1%} of the "
        "bound"
    )


def _in_words(layout: Layout) -> str:
    if layout.placement != SEPARATE:
        return f"placement={layout.placement}, max_staleness={layout.max_staleness}"
    return f"{layout.rollout} rollout, {layout.trainer} trainer"


def _count(devices: int) -> str:
    return f"{devices} device{'' if devices == 1 else 's'}"


def _there(prediction: Prediction | None) -> list[Prediction]:
    return [] if prediction is None else [prediction]


def _is_in_turn(prediction: Prediction) -> bool:
    return (prediction.layout.max_staleness, prediction.layout.hand_over) == (0, "batch")


def _preferred(candidates: Sequence[Prediction]) -> Prediction | None:
    """Returns the first candidate, or a later one that is faster by at least MIN_SPEEDUP; None without candidates."""
    chosen: Prediction | None = None
    for candidate in candidates:
        if chosen is None or chosen.step_seconds / candidate.step_seconds >= MIN_SPEEDUP:
            chosen = candidate
    return chosen
