"""python docs/write_timelines.py draws images/placements.png: the same steps under three placements, as simulated.

The durations are assumed (`WORK`, `REWARD_WORKERS`); who does what when is decided by the real controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from async_flowrl.config.shared import SHARED
from async_flowrl.plan.laws import Law
from async_flowrl.plan.simulate import Prediction, traced
from async_flowrl.plan.units import Unit
from async_flowrl.plan.work import Layout, Work

PICTURE = Path(__file__).parent / "images" / "placements.png"
DEVICES, REWARD_WORKERS, PROMPTS = 2, 8, 8
WORK = Work(PROMPTS, Law(30 / PROMPTS), Law(10 / PROMPTS), group_size=4, score=Law(3.0))
"""30 device-seconds of sampling and 10 of training per step, and 3 s for the reward of a group."""
LAYOUTS = {
    "sync, placement=shared": Layout(DEVICES, DEVICES, REWARD_WORKERS, 0, "batch", placement=SHARED),
    "one_step_off, placement=separate": Layout(1, 1, REWARD_WORKERS, 1, "stream"),
    "one_step_off, placement=shared": Layout(DEVICES, DEVICES, REWARD_WORKERS, 1, "stream", placement=SHARED),
}
STEPS, FIRST = 14, 6
"""Steps that are simulated, and the first one that is shown whole."""
SECONDS = 62.0
"""Seconds that are shown."""
SAMPLING, TRAINING = ("#9ecae1", "#4292c6"), ("#fdae6b", "#e6550d")
"""Colours for even and odd steps."""


@dataclass(frozen=True)
class Schedule:
    """One placement: what was computed, and on which device."""

    title: str
    prediction: Prediction
    units: Sequence[Unit]

    @property
    def began(self) -> float:
        """Virtual seconds at which the step before FIRST ended."""
        return self.prediction.ends[FIRST - 1]

    @property
    def step_seconds(self) -> float:
        """Mean of the two steps from FIRST on."""
        return (self.prediction.ends[FIRST + 1] - self.began) / 2

    def device(self, unit: Unit) -> int | None:
        """Returns the device of the unit, from 0; None for rewards."""
        pool, _, index = unit.place.rpartition("-")
        if pool not in ("rollout", "trainer"):
            return None
        separate = self.prediction.layout.placement == "separate"
        return int(index) + (self.prediction.layout.rollout if separate and pool == "trainer" else 0)

    def shown(self) -> list[Unit]:
        """Returns the units of devices that are in the picture."""
        window = self.began, self.began + SECONDS
        seen = [unit for unit in self.units if window[0] < unit.end > unit.start < window[1]]
        return [unit for unit in seen if self.device(unit) is not None]


def schedules(work: Work = WORK) -> list[Schedule]:
    """Simulates the work under each placement."""
    return [Schedule(title, *traced(work, layout, STEPS)) for title, layout in LAYOUTS.items()]


def draw(schedules: Sequence[Schedule]) -> Figure:
    """Returns the picture: a row per device, a bar per ticket or group, and a line at the end of each step."""
    figure, axes = plt.subplots(len(schedules), 1, figsize=(10, 5.4), sharex=True, layout="constrained")
    for axis, schedule in zip(axes, schedules, strict=True):
        _row(axis, schedule)
    axes[-1].set_xlabel("seconds")
    colours = [(SAMPLING[0], "samples, even step"), (SAMPLING[1], "odd step")]
    colours += [(TRAINING[0], "trains, even step"), (TRAINING[1], "odd step")]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in colours]
    figure.legend(handles, [name for _, name in colours], loc="outside upper right", ncols=4, frameon=False)
    return figure


def _row(axis: Axes, schedule: Schedule) -> None:
    began = schedule.began
    for unit in schedule.shown():
        device = schedule.device(unit)
        assert device is not None
        colours = TRAINING if unit.place.startswith("trainer") else SAMPLING
        start, end = max(unit.start - began, 0.0), min(unit.end - began, SECONDS)
        axis.broken_barh(
            [(start, end - start)], (device - 0.4, 0.8), facecolors=colours[unit.step % 2], edgecolor="white"
        )
    for end in schedule.prediction.ends:
        if 0 < end - began <= SECONDS:
            axis.axvline(end - began, color="black", linewidth=1.2)
    axis.set_title(f"{schedule.title}: {schedule.step_seconds:.3g} s per step", loc="left", fontsize=10)
    axis.set_yticks(range(DEVICES), [f"device {device}" for device in range(DEVICES)])
    axis.set_ylim(DEVICES - 0.4, -0.6)
    axis.set_xlim(0, SECONDS)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    draw(schedules()).savefig(PICTURE, dpi=110)
