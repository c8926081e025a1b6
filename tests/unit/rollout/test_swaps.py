"""Tests of the count of weight swaps: a change to weights that are not simply the next version."""

import pytest

from async_flowrl.rollout.rollout_worker import is_swap
from checkpoint_engine import PROOF_VERSION, Activation


def active(stream: str, version: int, digest: str = "") -> Activation:
    return Activation(stream, version, digest or f"{stream} {version}")


@pytest.mark.parametrize(
    ("before", "now", "swap"),
    [
        (None, active("policy", 0), 0),
        (active("policy", PROOF_VERSION), active("policy", 0), 0),
        (active("policy", 3), active("policy", 3), 0),
        (active("policy", 3), active("policy", 4), 0),
        (active("policy", 3), active("policy", 5), 0),
        (active("policy", 4), active("policy", 3), 1),
        (active("policy", 4), active("ema", 4), 1),
        (active("ema", 4), active("policy", 5), 1),
        (active("ema", 4, "same"), active("policy", 4, "same"), 0),
    ],
    ids=["first", "proof", "same", "next", "skipped one", "older", "average", "back", "other name"],
)
def test_an_exchange_is_what_is_no_newer_version(before: Activation | None, now: Activation, swap: int) -> None:
    assert is_swap(before, now) == swap
