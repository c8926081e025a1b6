"""Test of the time-out of trainer ranks' collectives: finite, and longer than the controller's deadlines."""

import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.run.launch import load_trainer
from separation.group import WorkerGroup
from tests.support.virtual import run_virtual


class Listener:
    """A rank that notes what it is called with."""

    node = "127.0.0.1"

    def __init__(self, index: int) -> None:
        self.name, self.heard = f"trainer-{index}", dict[str, tuple[Any, ...]]()

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        self.heard[method.rpartition(":")[2]] = args
        return {"ranks_per_replica": 1} if method == "load" else 1


@pytest.mark.parametrize("seconds", [3.0, math.inf])
def test_ranks_wait_for_each_other_as_long_as_any_call_may_take(seconds: float) -> None:
    """A rank may have nothing to do while another trains; the deadline that names the step comes first."""
    config = Config()
    config.deadlines.update, config.trainer.num_workers = seconds, 2
    ranks = [Listener(index) for index in range(2)]
    pool = cast("WorkerGroup", SimpleNamespace(workers=ranks, spec=SimpleNamespace(name="trainer")))
    trainers = TrainerGroup(pool, cast("Any", SimpleNamespace(select=lambda advantages: range(len(advantages)))))
    run_virtual(load_trainer(config, pool, trainers))
    for rank in ranks:
        limit = timedelta(seconds=rank.heard["join"][-1])
        longest_call = seconds * (MAX_GROUPS_PER_CALL + 1)
        assert limit.total_seconds() > longest_call or math.isinf(seconds)
    assert timedelta(seconds=ranks[0].heard["open_store"][1])
