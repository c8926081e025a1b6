"""Tests of the comparison of modes: its arithmetic, its refusals, and a whole run of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from async_flowrl.cli import benchmark
from async_flowrl.cli.benchmark import BASELINE, Measured, chosen, main, markdown, parser, read, variants
from async_flowrl.config.compose import compose_config

FAST = Measured("", 1.0, 100.0, 0.8, {"rollout": 0.9, "trainer": 0.8}, 1.0, "digest")
SUMMARY = {
    "images": 40,
    "steps": 4,
    "steady_images_per_s": 5.0,
    "bound": {"generation": 1.0, "update": 1.6, "seconds_per_step": 1.6},
    "pools": {"rollout": {"busy": 3.0, "idle": 1.0}, "reward": {"busy": 0.0, "idle": 0.0}},
    "staleness_mean": 0.5,
    "weights_digest": "abc",
}


def test_every_variant_uses_the_same_devices_and_composes() -> None:
    for variant in variants(8, 5):
        config = compose_config(variant.mode, [*benchmark.NOTHING_BUT_TRAINING, *variant.overrides])
        shared = config.placement == "shared"
        workers = config.rollout.num_workers, config.trainer.num_workers
        assert workers == ((8, 8) if shared else (5, 3))


@pytest.mark.parametrize("words", [["--devices", "1"], ["--split", "3"], ["--split", "0:2"], ["--only", "steam"]])
def test_what_cannot_be_compared_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("async_flowrl: ")


def test_only_what_was_asked_for_is_run() -> None:
    given = parser().parse_args(["--split", "5:3", "--only", "stream", "--only", BASELINE])
    assert [variant.name for variant in chosen(given)] == [BASELINE, "stream"]


def test_a_summary_is_read_as_steady_state_and_bound() -> None:
    found = read("stream", SUMMARY)
    assert (found.step_seconds, found.bound_seconds, found.busy) == (2.0, 1.6, {"rollout": 0.75, "reward": 0.0})
    with pytest.raises(benchmark.RunFailed):
        read("stream", {**SUMMARY, "steady_images_per_s": None})


def test_ratios_are_taken_within_a_repeat() -> None:
    rounds = [
        {
            BASELINE: replace(FAST, step_seconds=2.0 * slower),
            "stream": replace(FAST, step_seconds=slower, bound_seconds=0.8 * slower),
        }
        for slower in (1.0, 2.0)
    ]
    line = markdown("command", rounds).splitlines()[-1]
    assert (
        line == "| stream | 1.50 (1.00-2.00) | 100.0 | 2.00 (2.00-2.00) | 1.20 | 1.25 (1.25-1.25) | 90% | 80% | 1.00 |"
    )


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(benchmark.RunFailed) as failed:
        benchmark.run(variants(2, 1)[0], ["rollout.num_wokers=1"], tmp_path / "run")
    assert "rollout.num_wokers" in str(failed.value)


@pytest.mark.slow
def test_the_command_writes_its_files(tmp_path: Path) -> None:
    words = ["--repeats", "1", "--steps", "5", "--only", "stream", "--out", str(tmp_path), "runtime.backend=local"]
    assert main([*words, "prompts_per_step=2", "rollout.num_inference_steps=3"]) == 0
    (measured,) = json.loads((tmp_path / "benchmark.json").read_text())["rounds"]
    assert measured["stream"]["step_seconds"] > 0
    assert (tmp_path / "benchmark.png").stat().st_size > 5000
