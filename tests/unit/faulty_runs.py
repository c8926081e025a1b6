"""Toy runs in which a worker's call goes wrong, and what must be left of each: the weights of the calm run."""

from typing import Any

from tests.support.run_checks import STEPS, check_bound, check_once, check_watermarks
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Fault, Timing


def calm(k: int = 1, **changes: Any) -> ToyRun:
    return calm_run(toy_config(k, steps=STEPS, **changes))


def disturbed(fault: Fault, k: int = 1, *, timing: Timing | None = None, **changes: Any) -> ToyRun:
    return virtual(toy_config(k, steps=STEPS, **changes), timing, fault)


def always(worker: str, method: str, what: str) -> Fault:
    return lambda name, called, number: what if name.startswith(worker) and called == method else None


def check_recovered(found: ToyRun, k: int = 1) -> None:
    """Something was injected, and nothing came of it but time."""
    assert found.observer.of("injected"), "the disturbance did not happen"
    check_bound(found, k)
    check_once(found)
    check_watermarks(found)
    assert found.digest == calm(k).digest
