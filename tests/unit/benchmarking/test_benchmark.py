"""The benchmark's arithmetic, what it reads from a run, and its single-process parts on the tiny model."""

import json
import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl import benchmark
from async_flowrl.benchmarking import controller, engines, measure
from async_flowrl.benchmarking.latency import Latency
from async_flowrl.benchmarking.loops import Loops
from async_flowrl.benchmarking.measure import CpuWatch, Measured
from async_flowrl.benchmarking.table import Results, Round, as_json, markdown, picture, targets
from async_flowrl.benchmarking.variants import Machine, colocated, variants
from async_flowrl.compose import compose_overrides, typed
from async_flowrl.config import Config
from async_flowrl.prepare import prepare
from async_flowrl.recipe import Recipe
from async_flowrl.rollout.worker import RolloutWorker
from async_flowrl.tickets import TRAIN, Ticket
from async_flowrl.types import Prompt

MACHINE = Machine(2, 1, gpu=False)
FAST = Measured("", 1.0, 100.0, {"rollout": 0.9, "trainer": 0.9}, 1.0, 1.0, 0.95, 0.1, 0.001, 0.001, 0.02, "digest")


def results(**seconds: float) -> Results:
    """Two repeats, the second half as fast, of runs that take these seconds per step; G = 1, T = 0.9, S = 0.1."""
    rounds = []
    for slower in (1.0, 2.0):
        runs = {
            name.replace("_separate", " separate").replace("_colocated", " colocated 2 x 1"): replace(
                FAST, step_seconds=value * slower, images_per_s=100 / value / slower, publish=0.1 * slower,
                generation=1.02 * slower, update=0.9 * slower,
            )
            for name, value in seconds.items()
        }  # fmt: skip
        rounds.append(Round(Loops(slower, 0.9 * slower, 0.8 * slower, 0.9 * slower), runs))
    return Results(MACHINE, rounds, 10.0, 0.3, ["a=b"])


def test_ratios_are_taken_within_a_repeat() -> None:
    found = {t.what: t for t in targets(results(sync_colocated=1.9, sync_separate=2.0, stream=1.25, one_step_off=1.04))}
    bound = found["one_step_off step ÷ max(G,T)"]
    assert bound.values == pytest.approx((1.04, 1.04))
    assert bound.met
    assert found["sync separate step ÷ (G+T+S)"].value == pytest.approx(1.0)
    assert found["one_step_off speed-up ÷ its ceiling (G+T+S)/max(G,T)"].value == pytest.approx(1 / 1.04)
    assert found["stream ÷ sync separate (speed)"].value == pytest.approx(1.6)
    assert found["one_step_off ÷ best sync colocated (speed)"].value == pytest.approx(1.9 / 1.04)
    assert found["rollout images/s ÷ bare loop's"].value == pytest.approx(1 / 1.02)
    assert all(target.met for target in found.values())


def test_a_missed_target_says_so() -> None:
    slow = results(sync_separate=2.2, stream=2.0, one_step_off=1.2)
    found = {t.what: t.met for t in targets(slow)}
    assert not found["one_step_off step ÷ max(G,T)"]
    assert not found["sync separate step ÷ (G+T+S)"]
    assert not found["stream ÷ sync separate (speed)"]
    assert "| NO |" in markdown(slow)


def test_files(tmp_path: Path) -> None:
    found = results(sync_colocated=1.9, sync_separate=2.0, stream=1.25, one_step_off=1.04)
    benchmark.write(found, tmp_path)
    read = json.loads((tmp_path / "benchmark.json").read_text())
    assert read == json.loads(json.dumps(as_json(found)))
    assert read["rounds"][1]["bound"] == 2.0
    assert "| one_step_off | 1.56 (1.04-2.08) |" in (tmp_path / "benchmark.md").read_text()
    picture(found, tmp_path / "again.png")
    assert (tmp_path / "benchmark.png").stat().st_size > 5000


def test_variants_use_the_same_devices() -> None:
    config = Config(group_size=16)
    for machine, processes in ((Machine(2, 1, gpu=False), 2), (Machine(8, 5, gpu=True), 8)):
        for variant in variants(machine, config):
            given = dict(override.split("=") for override in variant.overrides)
            rollout, trainer = int(given["rollout.num_workers"]), int(given["trainer.num_workers"])
            if variant.colocated:
                assert rollout == trainer
                assert rollout * int(given.get("rollout.threads", 1)) == processes
            else:
                assert rollout + trainer == processes
    assert not colocated(Machine(3, 1, gpu=True), config)
    with pytest.raises(ValueError, match="at least 2 devices"):
        Machine.here(1, None)
    assert Machine.here(None, (5, 3)).trainer == 3


def test_every_variant_composes() -> None:
    given = benchmark.parser().parse_args(["--reward-latency", "0.2", "--reward-cv", "2"])
    overrides = benchmark.load_overrides(given)
    for variant in variants(MACHINE, Config()):
        composed = typed(compose_overrides(variant.mode, [*measure.PURE, *overrides, *variant.overrides]))
        assert composed.reward.terms["latency"].options == {"seconds": 0.2, "cv": 2.0}
        assert composed.prompts_per_step == 10


def test_odd_repeats_run_backwards() -> None:
    chosen = variants(MACHINE, Config())
    assert benchmark.order(chosen, 0) == chosen
    assert benchmark.order(chosen, 1) == chosen[::-1]


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    variant = variants(MACHINE, Config())[0]
    with pytest.raises(measure.RunFailed, match=r"(?s)code 2.*rollout\.num_wokers") as failed:
        measure.run(variant, "it", ["rollout.num_wokers=1"], tmp_path / "run")
    assert "it ended" in str(failed.value)


def test_worker_seconds_are_those_of_the_steps_asked_for() -> None:
    def ticket(step: int, state: str, at: float) -> dict[str, Any]:
        return {"event": "ticket", "kind": TRAIN, "step": step, "ordinal": step, "state": state, "time": at}

    history = [
        ticket(0, "RUNNING", 0.0), ticket(0, "SCORING", 5.0),
        ticket(1, "RUNNING", 5.0), ticket(1, "PENDING", 6.0), ticket(1, "RUNNING", 6.0), ticket(1, "SCORING", 9.0),
        {"event": "span", "name": "activate", "ordinal": 1, "start": 6.0, "end": 6.5, "time": 9.0},
        {"event": "span", "name": "activate", "ordinal": 0, "start": 0.0, "end": 1.0, "time": 5.0},
    ]  # fmt: skip
    assert measure.worker_seconds(history, range(1, 3)) == (3.0, 0.5)


def test_cpu_is_what_the_process_uses() -> None:
    watch = CpuWatch(os.getpid())
    start = time.time()
    while time.time() < start + 0.8:
        sum(range(1000))
    middle = time.time()
    time.sleep(0.8)
    end = time.time()
    watch.stop()
    assert watch.share(start, middle) > 5 * watch.share(middle + 0.2, end)
    assert watch.share(end + 1, end + 2) == 0.0


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
        assert found.tickets == 6 * (controller.STEPS - controller.WARM_UP)
        assert found.cpu_per_ticket > 0
    assert 100 < controller.bytes_per_ticket(100) < 1000


def test_what_wakes_a_worker_is_its_own_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work per ticket at the gate does not grow with the number of workers: nobody is asked for another's sake."""
    from async_flowrl.tickets import TicketTable

    asked = 0
    real = TicketTable.next_for

    def counting(self: TicketTable, worker: str) -> Any:
        nonlocal asked
        asked += 1
        return real(self, worker)

    monkeypatch.setattr(TicketTable, "next_for", counting)
    counts = []
    for workers in (10, 80):
        asked = 0
        controller.measure(workers, 0, "batch")
        counts.append(asked / workers)
    assert counts[1] <= 1.2 * counts[0]


def tiny(*overrides: str) -> Config:
    return typed(compose_overrides("one_step_off", ["group_size=2", "trainer.micro_batch_size=2", *overrides]))


def test_single_workers_beside_bare_loops() -> None:
    torch.set_num_threads(1)
    found = engines.compare(prepare(tiny("rollout.num_inference_steps=3", "output_dir=nowhere")), rounds=1)
    assert min(found.seconds.values()) > 0
    assert "rollout worker ÷ bare loop" in engines.markdown(found)


def test_bytes_of_a_ticket_in_the_object_store() -> None:
    """Window 2 of 10: no more than three latents per image, the picture, the text once per ticket, and 4 KB."""
    torch.set_num_threads(1)
    side, n = 64, 4
    config = tiny(
        f"rollout.resolution={side}", "rollout.num_inference_steps=10", f"group_size={n}",
        "algorithm.window=random", "algorithm.sde_window_size=2", "output_dir=nowhere",
    )  # fmt: skip
    prepared = prepare(config)
    worker = RolloutWorker(config, prepared.model, 0, "rollout-0")
    worker.load()
    recipe: Recipe = prepared.recipe
    made = worker.engine.generate(recipe.request(Ticket(TRAIN, 0, 0, 0, 0, 0)))
    assert made.trajectory is not None
    latent = 4 * int(np.prod(worker.engine.policy.latent_shape(side)))
    text = sum(array.nbytes for array in made.trajectory.conditioning.values())
    stored = len(pickle.dumps(made.images, 5)) + len(pickle.dumps(made.trajectory, 5))
    assert stored <= n * (3 * latent + 3 * side * side + 4096) + text
