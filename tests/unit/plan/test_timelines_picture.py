"""Test of the picture of placements in docs/modes.md: it shows the simulation's spans and nothing else."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from async_flowrl.plan.simulate import traced

SCRIPT = Path(__file__).parents[3] / "docs" / "write_timelines.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_timelines", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_bar_is_a_unit_of_the_simulation(script: ModuleType) -> None:
    found = script.schedules()
    for schedule, axis in zip(found, script.draw(found).axes, strict=True):
        _, units = traced(script.WORK, script.LAYOUTS[schedule.title], script.STEPS)
        began, end = schedule.began, schedule.began + script.SECONDS
        wanted = sorted(
            (max(unit.start - began, 0.0), min(unit.end, end) - max(unit.start, began))
            for unit in units
            if not unit.place.startswith("reward") and began < unit.end > unit.start < end
        )
        extents = [path.get_extents() for bar in axis.collections for path in bar.get_paths()]
        drawn = sorted((extent.x0, extent.width) for extent in extents)
        assert drawn == [pytest.approx(bar) for bar in wanted] and len(drawn) > 25
        assert f"{schedule.title}: {schedule.step_seconds:.3g} s per step" == axis.get_title(loc="left")


def test_the_steps_take_what_arithmetic_says(script: ModuleType) -> None:
    """G = 30, T = 10, R = 3 on two devices: (G + T)/2 + R in turn, max(G, T) of two pools, (G + T)/2 of one."""
    assert [one.step_seconds for one in script.schedules()] == pytest.approx([23.0, 30.0, 20.0])
    slower = script.schedules(replace(script.WORK, generate=script.WORK.generate.scaled(2.0)))
    assert [one.step_seconds for one in slower] == pytest.approx([38.0, 60.0, 35.0])
