"""Toy runs in which trainer ranks die, and the checks that all of them must pass."""

from typing import Any

from tests.support.toy import ToyRun, calm_run, toy_config
from tests.support.toy_pool import Fault, Timing

SHAKEN = Timing(seed=7, spread=0.9, update=0.3)
MODES: dict[str, dict[str, Any]] = {
    "batch": {"hand_over": "batch"},
    "two updates": {"hand_over": "batch", "trainer__updates_per_batch": 2},
    "stream": {"hand_over": "stream"},
}


def config(mode: str, ranks: int) -> Any:
    return toy_config(1, steps=6, prompts_per_step=8, trainer__num_workers=ranks, **MODES[mode])


def killing(*deaths: tuple[str, str, int]) -> Fault:
    return lambda worker, method, number: "kill" if (worker, method, number) in deaths else None


def undisturbed(mode: str) -> ToyRun:
    return calm_run(config(mode, 1), SHAKEN)


def check(found: ToyRun, mode: str) -> None:
    calm = undisturbed(mode)
    assert found.digest == calm.digest and found.published() == calm.published()
    once = found.tickets("TRAINED")
    assert len(once) == len(calm.tickets("TRAINED")) == len({event["ordinal"] for event in once})
