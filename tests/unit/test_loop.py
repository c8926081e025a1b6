"""Tests of the real controller in virtual time: bounds, equalities, order and back-pressure."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.controller.context import Context
from checkpoint_engine import PROOF_VERSION
from tests.support.run_checks import STEPS, check_bound, check_once, check_watermarks
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Timing, ToyPool, ToyWorker
from tests.unit.loop_runs import MODES, SHAKEN, TICKETS_PER_STEP, inverted, run

MODE = pytest.mark.parametrize("mode", MODES)


def sample_log(found: ToyRun) -> list[tuple[Any, ...]]:
    """Every trained ticket with the weights it was made with, and the reward of every step."""
    trained = [(e["ordinal"], e["version"], e["digest"]) for e in found.tickets("TRAINED")]
    return [*trained, *((line["reward/mean"], line["reward/std"]) for line in found.lines)]


def check_outstanding(found: ToyRun, k: int) -> None:
    """Tickets begun and not yet trained never exceed max_staleness + 1 steps, and come to that."""
    begun: set[int] = set()
    most = 0
    for event in found.observer.of("ticket", kind="train"):
        if event["state"] == "RUNNING":
            begun.add(event["ordinal"])
        elif event["state"] == "TRAINED":
            begun.discard(event["ordinal"])
        most = max(most, len(begun))
    assert most == min(k + 1, STEPS) * TICKETS_PER_STEP


@MODE
def test_staleness_is_exactly_the_smaller_of_step_and_k(mode: str) -> None:
    check_bound(run(mode), MODES[mode][0])


@MODE
def test_staleness_does_not_depend_on_timing(mode: str) -> None:
    for timing in (SHAKEN, Timing(update=0.01), Timing(generate=0.01), Timing(transfer=3.0)):
        check_bound(run(mode, timing=timing), MODES[mode][0])


@MODE
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_weights_do_not_depend_on_workers_or_delays(mode: str, workers: int) -> None:
    calm = run(mode, rollout__num_workers=1)
    timing = Timing(seed=workers, spread=0.9, slow={f"rollout-{workers - 1}": 3.0})
    shaken = run(mode, timing=timing, rollout__num_workers=workers, reward__num_workers=workers)
    assert not inverted(calm)
    assert inverted(shaken) == (workers > 1), "the disturbance did not happen"
    assert shaken.digest == calm.digest
    assert shaken.published() == calm.published()
    assert sample_log(shaken) == sample_log(calm)
    assert {event["worker"] for event in shaken.tickets("RUNNING")} == {f"rollout-{i}" for i in range(workers)}


@MODE
def test_weights_change_from_version_to_version_and_between_seeds_and_modes(mode: str) -> None:
    found = run(mode)
    digests = found.published()
    assert len(set(digests.values())) == len(digests) == STEPS + 1
    assert run(mode, seed=1).digest != found.digest
    assert len({run(other).digest for other in MODES}) == 3  # sync and stream agree


@MODE
def test_every_group_is_trained_once_in_its_own_step(mode: str) -> None:
    found = run(mode, timing=SHAKEN)
    assert inverted(found), "the disturbance did not happen"
    check_once(found)


@MODE
def test_live_bytes_are_what_the_label_says(mode: str) -> None:
    found = run(mode, timing=Timing(seed=3, spread=0.9, transfer=0.7), rollout__num_workers=3)
    received = found.observer.of("span", name="receive")
    busy = [e for e in found.tickets("RUNNING") for r in received if r["start"] < e["time"] < r["end"]]
    assert busy, "no weights arrived while an image was made"
    check_watermarks(found)


@MODE
def test_a_frozen_trainer_stops_generation_at_the_limit(mode: str) -> None:
    k = MODES[mode][0]
    found = run(mode, timing=Timing(update=1000.0, generate=0.1), deadlines__update=1e4)
    check_outstanding(found, k)
    first = found.tickets("TRAINED")[0]["time"]
    limit = min(k + 1, STEPS) * TICKETS_PER_STEP
    started = [e["time"] for e in found.tickets("RUNNING")]
    assert len([t for t in started if t < first]) == limit
    assert started[limit] - first < 0.2, "generation goes on at once when a step is done"


def test_the_proof_goes_from_node_to_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node sends it to two others, and each of them to two more."""
    monkeypatch.setattr(ToyWorker, "node", property(lambda worker: worker.name))
    found = virtual(toy_config(1, steps=1, rollout__num_workers=14), Timing(transfer=4.0))
    began = [span["start"] for span in found.observer.of("span", name="receive", version=PROOF_VERSION)]
    assert [*Counter(began).items()] == [(began[0], 2), (began[0] + 4.0, 4), (began[0] + 8.0, 8)]


class SlowReceive(Timing):
    """Weights need long to arrive at one worker; it makes images as fast as the others."""

    def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
        seconds = super().duration(worker, method, call, args)
        return seconds + 12.0 if (worker, method) == ("rollout-1", "receive") and call > 2 else seconds


def test_one_slow_acknowledgement_stalls_one_worker_only() -> None:
    found = run("sync", timing=SlowReceive())
    both, alone = run("sync"), run("sync", rollout__num_workers=1)
    assert found.digest == both.digest
    late = [e["worker"] for e in found.tickets("RUNNING") if e["step"] >= 1]
    assert late.count("rollout-0") > 3 * late.count("rollout-1")
    assert found.observer.of("step")[-1]["ended"] < alone.observer.of("step")[-1]["ended"]
    slow = [e["time"] for e in found.observer.of("version", worker="rollout-1", state="acknowledged")]
    assert slow[-1] - slow[0] > 12, "the disturbance did not happen"


def test_a_slow_prompt_keeps_its_share() -> None:
    plain = run("fully_async")
    slow = run("fully_async", timing=Timing(slow_prompts={"prompt 0": 10.0}))
    assert inverted(slow), "the disturbance did not happen"
    assert slow.seconds > plain.seconds
    assert slow.digest == plain.digest
    check_once(slow)
    assert {e["attempt"] for e in slow.tickets("RUNNING")} == {1}


@pytest.mark.extended
@pytest.mark.parametrize(("generate", "update"), [(2.0, 1.0), (1.0, 1.0), (4.0, 1.0)])
def test_one_step_off_takes_the_longer_of_generation_and_training(generate: float, update: float) -> None:
    """4 groups, 2 rollout workers: G = 2 generate, T = 4 update."""
    timing = Timing(generate=generate, update=update, score=0.01, transfer=0.01)
    found, sync = (run(mode, timing=timing) for mode in ("one_step_off", "sync"))
    g, t = 2 * generate, 4 * update
    steady = [event["ended"] - event["started"] for event in found.observer.of("step")][2:-1]
    assert sum(steady) / len(steady) == pytest.approx(max(g, t), rel=0.05)
    in_turn = [event["ended"] - event["started"] for event in sync.observer.of("step")][2:-1]
    assert sum(in_turn) / len(in_turn) == pytest.approx(g + t, rel=0.05)


@MODE
def test_tickets_smaller_than_a_group_make_the_same_weights(mode: str) -> None:
    whole, parts = run(mode, timing=SHAKEN), run(mode, timing=SHAKEN, ticket_size=2)
    assert parts.table.issued == 2 * whole.table.issued
    assert parts.digest == whole.digest
    check_bound(parts, MODES[mode][0])
    check_watermarks(parts)


def test_a_run_can_be_asked_to_stop_after_a_step() -> None:
    async def stop(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        await asyncio.sleep(9.0)
        ctx.stop_requested = lambda: True

    found = virtual(toy_config(1, steps=STEPS), disturb=stop)
    done = len(found.lines)
    assert 0 < done < STEPS
    assert found.digest == calm_run(toy_config(1, steps=done)).digest


def test_every_version_is_acknowledged_by_everybody_before_it_is_served() -> None:
    found = run("fully_async", timing=Timing(seed=5, spread=0.9, transfer=2.0), rollout__num_workers=3)
    acknowledged: dict[str, set[int]] = {}
    for event in found.observer.events:
        if event["event"] == "version" and event["state"] == "acknowledged":
            acknowledged.setdefault(event["worker"], set()).add(event["version"])
        if event["event"] == "ticket" and event["state"] == "RUNNING":
            assert event["version"] in acknowledged[event["worker"]]
    firsts = {e["version"]: e["time"] for e in reversed(found.observer.of("version", state="acknowledged"))}
    lasts = {e["version"]: e["time"] for e in found.observer.of("version", state="acknowledged")}
    assert any(lasts[v] - firsts[v] > 0.5 for v in firsts), "all acknowledged at once: nothing was tested"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_has_its_next_ticket_while_it_makes_one(workers: int, mode: str) -> None:
    """Never a third; and whoever has nothing is served before another gets a second."""
    found = run(mode, rollout__num_workers=workers)
    has: dict[str, set[int]] = defaultdict(set)
    seen = set()
    for event in found.observer.of("ticket", kind="train"):
        if event["state"] == "RUNNING":
            has[event["worker"]].add(event["ordinal"])
            seen.add(len(has[event["worker"]]))
            if len(has[event["worker"]]) == 2:
                assert all(has[worker.name] for worker in found.groups["rollout"].workers)
        elif event["state"] == "SCORING":
            has[event["worker"]].discard(event["ordinal"])
    assert max(seen) == (2 if workers == 1 or MODES[mode][0] > 0 else 1)
