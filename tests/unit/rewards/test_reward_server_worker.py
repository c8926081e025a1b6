"""Tests of a run's reward servers: their ports, deaths of their workers, and the terms that wait for them."""

from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.schema import RewardTerm
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.rewards.base import RewardError
from tests.support.toy import toy_config, virtual


@pytest.mark.parametrize("workers", [None, 1])
def test_a_term_whose_servers_are_lost_fails_without_being_asked(workers: int | None) -> None:
    """In the shared pool and in one of its own, whose workers then have nothing to do."""

    class Lost(RewardServers):
        def lost(self) -> Mapping[str, str]:
            return {"away": "died 4 times"}

    async def disturb(ctx: Any, pools: Any) -> None:
        ctx.servers = Lost()

    asked: list[tuple[str, str]] = []
    config = toy_config(steps=2)
    config.reward.terms = {"color": RewardTerm(), "away": RewardTerm(name="sharpness", required=False, workers=workers)}
    found = virtual(config, disturb=disturb, fault=lambda worker, method, count: asked.append((worker, method)))
    groups = 2 * config.prompts_per_step
    unscored = found.observer.of("unscored", term="away")
    assert len(unscored) == groups and {event["message"] for event in unscored} == {"died 4 times"}
    scored = [worker for worker, method in asked if method == "score"]
    assert len(scored) == groups and not [worker for worker in scored if worker.startswith("reward/away")]
    config.reward.terms = {"away": RewardTerm(name="sharpness", required=False, workers=workers)}
    with pytest.raises(RewardError, match="died 4 times"):
        virtual(config, disturb=disturb)
