"""Tests of dry_run=true, which describes the run and starts nothing."""

from async_flowrl.config.compose import compose_config
from async_flowrl.run.pools import pools
from async_flowrl.run.prepare import prepare


def test_held_out_terms_have_their_pools_whatever_the_placement() -> None:
    seats = "+evaluate.reward.terms={seen: {name: color, workers: 2}}"
    for placement, trained in (
        ("separate", ["trainer", "rollout"]),
        ("shared", ["shared"]),
    ):
        prepared = prepare(compose_config("sync", [f"placement={placement}", seats, "output_dir=unused"]))
        assert [pool.name for pool in pools(prepared)] == [*trained, "reward", "held_out/seen"]
