"""Tests of settings that placement=shared cannot be combined with."""

import pytest

from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["sync", "stream", "one_step_off", "fully_async"])
def test_every_mode_may_share(mode: str) -> None:
    for shard in ("auto", "none"):
        pools = ["trainer.num_workers=3", "rollout.num_workers=3", f"trainer.shard={shard}"]
        check(compose_config(mode, ["placement=shared", *pools]))
