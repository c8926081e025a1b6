"""Tests on the kept runs of examples/glyphs/hacked_runs.py: the present alarm tells hacked runs from honest ones."""

import pytest

from async_flowrl.observability.hacking import alarms
from examples.glyphs.compare import ROOT
from examples.glyphs.hacked_runs import FROZEN_ON, JUDGED_ON, VARIANTS, as_it_should, load

RESULTS = ROOT / "examples/glyphs/hacking_results"
SEEDS = (*FROZEN_ON, *JUDGED_ON)


@pytest.mark.extended
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_alarm_is_right_about_every_run(variant: str) -> None:
    runs = [load(RESULTS / f"{variant}_seed{seed}.json") for seed in SEEDS]
    assert len(runs) == 8 and all(as_it_should(variant, run) for run in runs)
    other = "compressible" if variant == "honest" else "honest"
    assert not any(as_it_should(other, run) for run in runs), "a hacked run is no honest one, and the other way round"


@pytest.mark.parametrize(("threshold", "strict"), [("LEVEL", 1e-6), ("LEAST_FALL", 1.5), ("MOST_CORRELATION", -0.99)])
def test_stricter_thresholds_would_miss_hacked_runs(
    threshold: str, strict: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So these runs would tell of a change that makes the alarm deaf."""
    hacked = [load(RESULTS / f"{kind}_seed{seed}.json") for kind in VARIANTS if kind != "honest" for seed in SEEDS]
    assert sum(bool(alarms(run)) for run in hacked) == 16
    monkeypatch.setattr(f"async_flowrl.observability.hacking.{threshold}", strict)
    assert sum(bool(alarms(run)) for run in hacked) < 16
