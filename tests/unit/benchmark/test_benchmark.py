"""Tests of the benchmark: its arithmetic, its reading of a run, and its single-process parts on the tiny model."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_flowrl.benchmark import __main__ as benchmark
from async_flowrl.benchmark import compare, loops, measure
from async_flowrl.benchmark.latency import Latency
from async_flowrl.benchmark.loops import Loops
from async_flowrl.benchmark.measure import Measured
from async_flowrl.benchmark.table import as_json, from_json, markdown, picture
from async_flowrl.benchmark.targets import Load, Results, Round, targets
from async_flowrl.benchmark.variants import SHARED, Machine, chosen, in_turn, variants
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.table import TRAIN
from async_flowrl.types import Prompt
from tests.performance import controller, engines, payload, profile, suite

MACHINE = Machine(2, 1, gpu=False)
FAST = Measured("", 1.0, 100.0, {"rollout": 0.9, "trainer": 0.9}, 1.0, 1.0, 0.95, 0.1, 0.001, 0.001, 0.02, "digest")


def results(**seconds: float) -> Results:
    """Two repeats, the second half as fast, of runs that take these seconds per step; G = 1, T = 0.9, S = 0.1."""
    rounds = []
    for slower in (1.0, 2.0):
        runs = {
            name.replace("_separate", " separate").replace("_shared", " shared 2 x 1"): replace(
                FAST, step_seconds=value * slower, images_per_s=100 / value / slower, publish=0.1 * slower,
                generation=1.02 * slower, update=0.9 * slower,
            )
            for name, value in seconds.items()
        }  # fmt: skip
        rounds.append(Round(Loops(slower, 0.9 * slower, 0.8 * slower, 0.9 * slower), runs))
    return Results(MACHINE, rounds, Load(10.0, latency=0.3), "python -m async_flowrl.benchmark a=b", ["a=b"])


def test_ratios_are_taken_within_a_repeat() -> None:
    measured = results(sync_shared=1.9, sync_separate=2.0, stream=1.25, one_step_off=1.04)
    found = {target.key: target for target in targets(measured)}
    assert found["step"].values == pytest.approx((1.04, 1.04))
    assert found["step"].met
    assert found["sync"].value == pytest.approx(1.0)
    assert found["speed_up"].value == pytest.approx(1 / 1.04)
    assert found["stream"].value == pytest.approx(1.6)
    assert found["in_turn"].value == pytest.approx(1.9 / 1.04)
    assert found["rollout"].value == pytest.approx(1 / 1.02)
    assert all(target.met for target in found.values())


def test_a_missed_target_says_so() -> None:
    slow = results(sync_separate=2.2, stream=2.0, one_step_off=1.2)
    found = {target.key: target.met for target in targets(slow)}
    assert not found["step"]
    assert not found["sync"]
    assert not found["stream"]
    assert "| **no** |" in markdown(slow)


def test_targets_are_those_of_what_was_run() -> None:
    assert {t.key for t in targets(results(sync_separate=2.0))} == {"sync"}
    alone = {t.key for t in targets(results(one_step_off=1.0))}
    assert alone == {"step", "rollout", "update", "trainer_stall", "worker_stall", "controller"}


def test_the_bound_knows_of_slow_workers_and_slow_rewards() -> None:
    four = replace(results(one_step_off=1.0), machine=Machine(6, 4, gpu=True))
    pace = Loops(4.0, 1.0)
    assert four.bound(pace) == 1.0
    assert replace(four, load=Load(4.0, slow_worker=2.0)).bound(pace) == pytest.approx(4.0 / 3.5)
    assert replace(four, load=Load(4.0, reward_seconds=1.7)).bound(pace) == 1.7


def test_files(tmp_path: Path) -> None:
    found = results(sync_shared=1.9, sync_separate=2.0, stream=1.25, one_step_off=1.04)
    benchmark.write(found, tmp_path)
    read = json.loads((tmp_path / "benchmark.json").read_text())
    assert read == json.loads(json.dumps(as_json(found)))
    assert read["rounds"][1]["bound"] == 2.0
    assert markdown(from_json(read)) == (tmp_path / "benchmark.md").read_text()
    assert "| one_step_off | 1.56 (1.04-2.08) |" in (tmp_path / "benchmark.md").read_text()
    picture(found, tmp_path / "again.png")
    assert (tmp_path / "benchmark.png").stat().st_size > 5000


def test_variants_use_the_same_devices() -> None:
    for machine, processes in ((Machine(2, 1, gpu=False), 2), (Machine(8, 5, gpu=True), 8)):
        for variant in variants(machine):
            given = dict(override.split("=") for override in variant.overrides)
            rollout, trainer = int(given["rollout.num_workers"]), int(given["trainer.num_workers"])
            if variant.name == SHARED:
                assert rollout == trainer == processes
            elif variant.in_turn:
                assert rollout == trainer
                assert rollout * int(given.get("rollout.threads", 1)) == processes
            else:
                assert rollout + trainer == processes
    assert [variant.name for variant in in_turn(Machine(3, 1, gpu=True))] == ["sync shared 3 x 1"]
    names = [variant.name for variant in chosen(MACHINE, ["stream", "sync shared"])]
    assert names == ["sync shared 1 x 2 threads", "sync shared 2 x 1", "stream"]
    assert chosen(MACHINE, []) == variants(MACHINE)
    with pytest.raises(ValueError, match="did you mean 'stream'"):
        chosen(MACHINE, ["steam"])
    with pytest.raises(ValueError, match="at least 2 devices"):
        Machine.here(1, None)
    assert Machine.here(None, (5, 3)).trainer == 3


def test_every_variant_composes() -> None:
    given = compare.parser().parse_args(
        ["--reward-cv", "2", "--slow-worker", "3", "--resolution", "48", "--trained-steps", "2", "prompts_per_step=4"]
    )
    overrides = compare.load_overrides(given, 0.2)
    for variant in variants(MACHINE):
        composed = compose_config(variant.mode, [*measure.NOTHING_BUT_TRAINING, *overrides, *variant.overrides])
        assert composed.reward.terms["latency"].options == {"seconds": 0.2, "cv": 2.0}
        assert composed.debug.delays.slow_worker == 3.0
        assert (composed.rollout.resolution, composed.algorithm.sde_window_size) == (48, 2)
        assert composed.prompts_per_step == 4, "an override wins over the load's own numbers"


def test_runs_are_interleaved_and_the_latency_is_a_share_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, list[str]]] = []

    def run(variant: Any, name: str, overrides: Any, directory: Path) -> Measured:
        ran.append((name, list(overrides)))
        return replace(FAST, variant=variant.name)

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(loops, "measure", lambda config, *, seconds, alone: Loops(2.0, 1.5))
    arguments = ["--devices", "2", "--only", "stream", "--only", "sync separate", "--reward-latency-share", "0.3"]
    found = compare.compare(arguments, tmp_path)
    names = [name for name, _ in ran]
    assert names == [f"{name} (repeat {n})" for name, n in (
        ("sync separate", 1), ("stream", 1), ("stream", 2), ("sync separate", 2)
    )]  # fmt: skip
    assert all("reward.terms.latency.options.seconds=0.6" in overrides for _, overrides in ran)
    assert found.load.latency == 0.6
    assert found.load.reward_seconds == pytest.approx(10 * 0.6)
    assert (
        found.command == "python -m async_flowrl.benchmark --devices 2 --only stream --only 'sync separate' "
        "--reward-latency-share 0.3"
    )


def test_loads_are_found_by_measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seconds per prompt 0.04 + 0.008 n and 0.012 (n - 1): as 1, 1.2 and 0.83 at n = 13, 9 and 25."""

    def side_by_side(configs: Any, *, seconds: float) -> list[Loops]:
        steps = [config.rollout.num_inference_steps for config in configs]
        prompts = [config.prompts_per_step for config in configs]
        return [Loops(p * (0.04 + 0.008 * n), p * 0.012 * (n - 1)) for n, p in zip(steps, prompts, strict=True)]

    monkeypatch.setattr(loops, "side_by_side", side_by_side)
    pace = suite.Pace.of(MACHINE, [], tmp_path)
    assert [pace.steps_for(ratio) for ratio in (1.0, 1.2, 1 / 1.2)] == [13, 9, 25]
    assert pace.load(suite.CASES[0]) == ("prompts_per_step=14", "rollout.num_inference_steps=13")
    assert pace.load(suite.CASES[1]) == ("prompts_per_step=18", "rollout.num_inference_steps=9")


def test_the_suite_has_a_row_for_every_target_and_comes_back_from_its_file(tmp_path: Path) -> None:
    measured = results(sync_shared=1.9, sync_separate=2.0, stream=1.25, one_step_off=1.04)
    rows = [row for case in suite.CASES for row in suite.rows_of(case, measured)]
    keys = [target.key for target, _ in rows]
    assert keys.count("step") == 3
    assert set(keys) == {target.key for target in targets(measured)}
    found = suite.Suite({"cores": "2"}, {"balanced": measured}, rows, {"balanced": "command"})
    suite.write(found, tmp_path)
    read = suite.from_dictionary(json.loads((tmp_path / "targets.json").read_text()))
    assert suite.markdown(read) == (tmp_path / "targets.md").read_text()
    assert "| `one_step_off` step ÷ max(G,T) at G:T = 1.11 | ≤ 1.05 | 1.040 (1.040-1.040) | yes | balanced |" in (
        suite.markdown(found)
    )


def test_odd_repeats_run_backwards() -> None:
    every = variants(MACHINE)
    assert compare.order(every, 0) == every
    assert compare.order(every, 1) == every[::-1]


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    variant = variants(MACHINE)[0]
    with pytest.raises(measure.RunFailed, match=r"(?s)code 2.*rollout\.num_wokers") as failed:
        measure.run(variant, "it", ["rollout.num_wokers=1"], tmp_path / "run")
    assert "it ended" in str(failed.value)


def test_worker_seconds_are_those_of_the_steps_asked_for() -> None:
    def ticket(step: int, state: str, at: float) -> dict[str, Any]:
        found = {"event": "ticket", "kind": TRAIN, "step": step, "ordinal": step, "state": state, "time": at}
        return found | {"worker": "rollout-0"}

    history = [
        ticket(0, "RUNNING", 0.0), ticket(0, "SCORING", 5.0),
        ticket(1, "RUNNING", 5.0), ticket(1, "PENDING", 6.0), ticket(1, "RUNNING", 6.0), ticket(2, "RUNNING", 7.0),
        ticket(1, "SCORING", 9.0), ticket(2, "SCORING", 11.0),
        {"event": "span", "name": "activate", "ordinal": 1, "start": 6.0, "end": 6.5, "time": 9.0},
        {"event": "span", "name": "activate", "ordinal": 0, "start": 0.0, "end": 1.0, "time": 5.0},
    ]  # fmt: skip
    assert measure.worker_seconds(history, range(1, 3)) == (3.0 + 2.0, 0.5), "the second was given ahead"


def test_latency_takes_its_time_and_no_side(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    images, prompt = np.zeros((3, 2, 2, 3), np.uint8), Prompt(0, "red")
    assert Latency(0.5)(images, prompt) == [0.0] * 3
    tailed = Latency(0.5, cv=2.0)
    for _ in range(4000):
        tailed(images, prompt)
    assert slept[0] == 0.5
    assert np.mean(slept[1:]) == pytest.approx(0.5, rel=0.15)
    assert np.max(slept[1:]) > 5.0
    with pytest.raises(ValueError, match="negative"):
        Latency(-1.0)


def test_the_controller_serves_every_ticket() -> None:
    for mode in controller.MODES:
        found = controller.measure(6, *mode)
        assert found.tickets == 6 * (controller.STEPS - controller.WARM_UP_STEPS)
        assert found.cpu_per_ticket > 0
    assert 100 < controller.bytes_per_ticket(100) < 1000


def test_what_wakes_a_worker_is_its_own_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work per ticket at the gate does not grow with the number of workers: nobody is asked for another's sake."""
    from async_flowrl.tickets.table import TicketTable

    asked = 0
    real = TicketTable.next_for

    def counting(self: TicketTable, worker: str, **how: Any) -> Any:
        nonlocal asked
        asked += 1
        return real(self, worker, **how)

    monkeypatch.setattr(TicketTable, "next_for", counting)
    counts = []
    for workers in (10, 80):
        asked = 0
        controller.measure(workers, 0, "batch")
        counts.append(asked / workers)
    assert counts[1] <= 1.2 * counts[0]


def tiny(*overrides: str) -> Config:
    return compose_config("one_step_off", ["group_size=2", "trainer.micro_batch_size=2", *overrides])


def test_single_workers_beside_bare_loops() -> None:
    found = engines.compare(prepare(tiny("rollout.num_inference_steps=3", "output_dir=nowhere")), rounds=1)
    assert min(found.seconds.values()) > 0
    assert "rollout worker ÷ bare loop" in engines.markdown(found)


def test_the_profile_adds_up() -> None:
    pools = profile.profile(prepare(tiny("rollout.num_inference_steps=3", "output_dir=nowhere")), rounds=1)
    assert {"transformer", "VAE decode"} < set(pools["rollout"])
    assert {"transformer", "backward", profile.PROBE, "micro-batches from trajectories"} < set(pools["trainer"])
    for seconds in pools.values():
        assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
        assert min(seconds.values()) >= 0


@pytest.mark.parametrize("role", loops.ROLES)
def test_the_bare_loops_take_the_demos_model(role: str) -> None:
    """Its latents are a quarter of the picture, not an eighth."""
    small = ("experiment=glyphs", "prompts_per_step=1", "rollout.num_inference_steps=2", "output_dir=nowhere")
    loops.step_of(tiny(*small), role)()


def test_bytes_of_a_ticket_in_the_object_store() -> None:
    """Window 2 of 10: no more than three latents per image, the picture, the text once per ticket, and 4 KB."""
    for resolution, images in ((64, 4), (128, 2)):
        found = payload.measure(resolution, images)
        assert found.latent == resolution * resolution
        assert found.stored <= found.allowed
        assert found.allowed == 3 * found.latent + 3 * resolution**2 + 4096 + found.embeddings / images
