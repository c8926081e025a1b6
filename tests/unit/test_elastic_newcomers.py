"""Tests of newcomers of an elastic pool that cannot serve, or still load."""

import asyncio
from typing import Any

import pytest

from async_flowrl.controller.context import Context
from checkpoint_engine import WeightsMismatch
from tests.support.toy import virtual
from tests.support.toy_pool import ListObserver, Timing
from tests.support.toy_rollout import ToyRollout
from tests.unit.elastic_runs import Pools, elastic_config, growth_of


def test_a_newcomer_with_other_modules_never_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = ToyRollout.prove
    observer = ListObserver()

    def other(self: ToyRollout, version: int) -> Any:
        proof = prove(self, version)
        return {name: value + 1 for name, value in proof.items()} if self.name == "rollout-2" else proof

    async def arrive(ctx: Context, pools: Pools) -> None:
        await asyncio.sleep(1.0)
        growth_of(pools).arrive()

    monkeypatch.setattr(ToyRollout, "prove", other)
    with pytest.raises(WeightsMismatch, match="rollout-2"):
        virtual(elastic_config(), Timing(generate=3.0), disturb=arrive, observer=observer)
    assert not observer.of("ticket", worker="rollout-2", state="RUNNING")
