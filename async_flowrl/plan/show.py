"""Plans as text and as JSON, for the prediction command (`plan/command.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from async_flowrl.plan.advise import Advice
from async_flowrl.plan.placements import Placements
from async_flowrl.plan.simulate import Prediction
from separation.table import format_table

SPLIT_HEAD = ("rollout", "trainer", "bound s", "step s", "of bound", "rollout busy", "trainer busy")
PLACEMENT_HEAD = ("placement", "devices", "max_staleness", "hand_over", "bound s", "step s", "of bound")
DEPTH_HEAD = ("max_staleness", "hand_over", "step s", "of bound", "age", "rollout busy", "trainer busy", "waiting MB")


def text(advice: Advice) -> str:
    """Returns the tables of splits and of staleness, and the sentences of the advice."""
    parts = []
    if advice.splits:
        how = advice.splits[0].layout
        parts += [f"splits (max_staleness={how.max_staleness}, hand_over={how.hand_over})"]
        parts += [table(SPLIT_HEAD, [_split_row(p) for p in advice.splits], marked=_at_split(advice)), ""]
    if advice.depths:
        how = advice.depths[0].layout
        parts += [f"max_staleness and hand_over at {how.rollout} rollout and {how.trainer} trainer devices"]
        parts += [table(DEPTH_HEAD, [_depth_row(p) for p in advice.depths], marked=_at_depth(advice)), ""]
    if rows := _placements(advice.placements):
        marked = rows.index(advice.placements.best) if advice.placements.best in rows else None
        parts += ["placements", table(PLACEMENT_HEAD, [_placement_row(p) for p in rows], marked=marked), ""]
    return "\n".join([*parts, *advice.sentences]) + "\n"


def as_json(advice: Advice) -> dict[str, Any]:
    """Returns the advice as a dictionary for JSON."""
    return {
        "splits": [record(p) for p in advice.splits],
        "depths": [record(p) for p in advice.depths],
        "chosen": record(advice.chosen) if advice.chosen else None,
        "shared": [record(p) for p in advice.placements.shared],
        "best": record(advice.placements.best) if advice.placements.best else None,
        "advice": list(advice.sentences),
    }


def record(prediction: Prediction) -> dict[str, Any]:
    """Returns one prediction as a dictionary: seconds, shares from 0 to 1, bytes, staleness in versions."""
    layout = prediction.layout
    return {
        "placement": layout.placement,
        "rollout": layout.rollout,
        "trainer": layout.trainer,
        "reward": layout.reward_workers,
        "max_staleness": layout.max_staleness,
        "hand_over": layout.hand_over,
        "step_seconds": prediction.step_seconds,
        "bound_seconds": prediction.bounds.overlapped,
        "efficiency": prediction.efficiency,
        "staleness_mean": prediction.staleness,
        "staleness_max": prediction.staleness_max,
        "pools": {pool: dict(states) for pool, states in prediction.pools.items()},
        "payload_bytes": prediction.payload_bytes,
        "adapter_bytes": prediction.adapter_bytes,
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> str:
    """Returns a table with right-aligned columns; an arrow ends the row with index `marked` (None: no row)."""
    lines = format_table(head, rows, align=str.rjust).splitlines()
    if marked is not None:
        lines[marked + 1] += "  <-"
    return "\n".join(lines)


def comparison(compared: Mapping[str, Any]) -> str:
    """Returns predicted and actual values in one clause; `compared` is from `prediction.predicted_against_actual`."""
    predicted, actual = compared["predicted"], compared["actual"]
    return (
        f"predicted {predicted['step_seconds']:.3g} s per step (rollout busy {predicted['rollout']:.0%}, trainer "
        f"{predicted['trainer']:.0%}), actual {actual['step_seconds']:.3g} s ({compared['deviation']:+.1%}; "
        f"{actual['rollout']:.0%}, {actual['trainer']:.0%})"
    )


def _placements(placements: Placements) -> list[Prediction]:
    separate = [] if placements.separate is None else [placements.separate]
    return [*separate, *placements.shared]


def _placement_row(p: Prediction) -> list[str]:
    layout = p.layout
    where = [layout.placement, str(layout.devices), str(layout.max_staleness), layout.hand_over]
    return [*where, f"{p.bounds.overlapped:.3g}", *_common(p)]


def _split_row(p: Prediction) -> list[str]:
    layout = p.layout
    return [str(layout.rollout), str(layout.trainer), f"{p.bounds.overlapped:.3g}", *_common(p), *_busy(p)]


def _depth_row(p: Prediction) -> list[str]:
    how = [str(p.layout.max_staleness), p.layout.hand_over]
    return [*how, *_common(p), f"{p.staleness:.2f}", *_busy(p), f"{p.payload_bytes / 1e6:.1f}"]


def _common(p: Prediction) -> list[str]:
    return [f"{p.step_seconds:.3g}", f"{p.efficiency:.1%}"]


def _busy(p: Prediction) -> list[str]:
    return [f"{p.busy('rollout'):.0%}", f"{p.busy('trainer'):.0%}"]


def _at_split(advice: Advice) -> int | None:
    if advice.chosen is None:
        return None
    wanted = advice.chosen.layout.rollout, advice.chosen.layout.trainer
    return [(p.layout.rollout, p.layout.trainer) for p in advice.splits].index(wanted)


def _at_depth(advice: Advice) -> int | None:
    return list(advice.depths).index(advice.chosen) if advice.chosen in advice.depths else None
