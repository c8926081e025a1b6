"""Toy runs of an elastic pool of rollout workers, in virtual time."""

from collections.abc import Mapping
from typing import Any

from async_flowrl.config.schema import Config
from tests.support.run_checks import check_bound, check_once, check_watermarks
from tests.support.toy import Disturbance, ToyRun, calm_run, toy_config, virtual
from tests.support.toy_growth import ToyGrowth
from tests.support.toy_pool import Timing, ToyPool, no_fault

STEPS = 6

Pools = Mapping[str, ToyPool]


def elastic_config(k: int = 1, *, least: int = 1, most: int = 4, **changes: Any) -> Config:
    bounds = {"rollout__min_workers": least, "rollout__max_workers": most}
    return toy_config(k, steps=STEPS, **{"rollout__num_workers": 2, **bounds, **changes})


def growth_of(pools: Pools) -> ToyGrowth:
    growth = pools["rollout"].growth
    assert isinstance(growth, ToyGrowth)
    return growth


def run_while(disturb: Disturbance, config: Config | None = None, timing: Timing | None = None) -> ToyRun:
    """A run to which something happens; its weights are those of a pool of two that nothing happens to."""
    config = config or elastic_config()
    found = virtual(config, timing, no_fault, disturb=disturb)
    k = config.max_staleness
    assert found.digest == calm_run(toy_config(k, steps=STEPS)).digest
    check_bound(found, k)
    check_once(found)
    check_watermarks(found)
    return found
