"""Tests of dry_run=true, which describes the run and starts nothing."""

from async_flowrl.config.compose import compose_config
from async_flowrl.run.describe import describe_inputs
from async_flowrl.run.launch import describe_run
from async_flowrl.run.pools import pools
from async_flowrl.run.prepare import prepare


def test_pools_tickets_and_bytes_are_those_of_the_configuration() -> None:
    config = compose_config("fully_async", ["rollout.num_workers=3", "ticket_size=8", "output_dir=unused"])
    text = describe_run(prepare(config))
    assert "fully_async: max_staleness 2, stream hand-over" in text
    assert "100 steps of 32 images: 4 tickets of 8" in text
    assert "rollout  3 " in text
    # 3 steps x 32 images x (3 kB of pixels, 6 latents of 256 float32, 5 log-probs), and a text of 128 x 32 per ticket
    assert f"{3 * (32 * (3 * 1024 + 6 * 256 * 4 + 5 * 4) + 4 * 128 * 32 * 4) / 1e6:.1f} MB" in text


def test_held_out_terms_have_their_pools_whatever_the_placement() -> None:
    seats = "+evaluate.reward.terms={seen: {name: color, workers: 2}}"
    for placement, trained in (
        ("separate", ["trainer", "rollout"]),
        ("shared", ["shared"]),
    ):
        prepared = prepare(compose_config("sync", [f"placement={placement}", seats, "output_dir=unused"]))
        assert [pool.name for pool in pools(prepared)] == [*trained, "reward", "held_out/seen"]


def test_the_terms_of_the_reward_are_named() -> None:
    terms = "reward.terms={color: {weight: 2}, small: {name: jpeg_compressibility, weight: -1, required: false}}"
    said = describe_inputs(prepare(compose_config("one_step_off", [terms, "output_dir=unused"])))
    assert said.endswith("reward     2 × color - 1 × small (jpeg_compressibility, not required)\n")
