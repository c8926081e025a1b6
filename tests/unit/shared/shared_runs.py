"""Runs of `placement=shared` in virtual time, and runs of separate pools to which they must be equal."""

import functools
from typing import Any

from tests.support.toy import TEXTS, ToyRun, toy_config, virtual
from tests.support.toy_pool import Fault, Timing, no_fault
from tests.support.toy_shared import shared_config, shared_toys, shared_virtual

SHAKEN = Timing(seed=7, spread=0.9, update=0.3)
MODES: dict[str, dict[str, Any]] = {
    "sync": {"k": 0, "hand_over": "batch"},
    "stream": {"k": 0, "hand_over": "stream"},
    "one step off": {"k": 1, "hand_over": "stream"},
    "fully async": {"k": 3, "hand_over": "batch", "trainer__updates_per_batch": 2},
}


def shared(mode: str, workers: int, fault: Fault = no_fault, timing: Timing = SHAKEN, **more: Any) -> ToyRun:
    """`more`: settings of the run, `disturb`, and `texts`, the training prompts."""
    disturb, texts = more.pop("disturb", None), more.pop("texts", TEXTS)
    config = shared_config(workers=workers, prompts_per_step=8, **MODES[mode], **more)
    with shared_toys():
        return shared_virtual(config, timing, fault, disturb=disturb, texts=texts)


@functools.cache
def separate(mode: str, *, texts: tuple[str, ...] = TEXTS, **more: Any) -> ToyRun:
    return virtual(toy_config(prompts_per_step=8, **MODES[mode], **more), SHAKEN, texts=texts)


def check(found: ToyRun, mode: str, **more: Any) -> None:
    """The weights of separate pools, every ticket trained once."""
    calm = separate(mode, **more)
    assert found.digest == calm.digest and found.published() == calm.published()
    assert found.staleness() == calm.staleness()
    once = found.tickets("TRAINED")
    assert len(once) == len(calm.tickets("TRAINED")) == len({event["ordinal"] for event in once})


def first(worker: str, method: str, what: str, *, after: int = 0) -> Fault:
    """The fault befalls the first such call of that worker, or the first after so many."""
    left = [after, 1]

    def fault(who: str, called: str, number: int) -> str | None:
        if (who, called) != (worker, method):
            return None
        index = 0 if left[0] else 1
        left[index] -= 1
        return what if index and left[1] == 0 else None

    return fault
