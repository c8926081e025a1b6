"""CPU time of the frame: what driver, reward worker and Ray's own processes take from the pools on a machine's cores.

A plan for workers that compute on the cores of one machine has it in its steps. On GPUs the frame has cores of its own,
and `runtime.backend=local` has none of these processes.
"""

from collections.abc import Mapping
from dataclasses import replace

from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import Work

STEP_SECONDS = 0.015
"""CPU seconds per step for what a step does once: its version, its line of metrics, its events.

The three numbers come from three measurements: 27 ms per step of 0.22 s with 2 tickets, 60 ms per step of 1.45 s with
2 tickets, and 110 ms per step of 2.1 s with 12 tickets (docs/benchmarks.md).
"""
CALL_SECONDS = 0.00107
"""CPU seconds of a call of a worker: each call with tickets is one, and a group has one to score and one to train."""
IDLE_SHARE = 0.027
"""CPU seconds per second that these processes take whatever they do."""
ON_CORES = ("rollout", "trainer")
"""Pools that compute on the cores; the time of a reward is not counted as work of these."""


def calls_of(work: Work) -> int:
    """Returns the calls of workers per step: tickets, scores and groups to train."""
    return -(-work.tickets_per_step // work.tickets_per_batch) + 2 * work.prompts_per_step


def with_frame(prediction: Prediction, work: Work, cores: int) -> Prediction:
    """Returns the prediction with the frame on the same `cores` as the pools, which compute with one thread each.

    Cores that have nothing to do take the frame's work and lose nothing. Otherwise pools and frame together keep all
    cores busy, and the step is as long as that takes: the pools then need longer for the same work, and their bounds
    are longer by as much. With `max_staleness=0` nothing is computed beside the calls that end a step and begin the
    next, so that they are added.
    """
    layout, before = prediction.layout, prediction.step_seconds
    alone = STEP_SECONDS + 3 * CALL_SECONDS if layout.max_staleness == 0 else 0.0
    work_seconds = before * sum(
        workers * prediction.busy(pool)
        for pool, workers in zip(ON_CORES, (layout.rollout, layout.trainer), strict=True)
    )
    calls = STEP_SECONDS + CALL_SECONDS * calls_of(work)
    seconds = max(before + alone, (work_seconds + calls) / (cores - IDLE_SHARE))
    longer = seconds / before if before > 0 else 1.0
    slower = seconds / (before + alone) if before + alone > 0 else 1.0
    bounds = prediction.bounds
    return replace(
        prediction,
        bounds=replace(bounds, generation=slower * bounds.generation, update=slower * bounds.update),
        step_seconds=seconds,
        frame_seconds=calls + IDLE_SHARE * seconds,
        pools={
            pool: _within(before + alone if pool in ON_CORES else seconds, states, before)
            for pool, states in prediction.pools.items()
        },
        ends=tuple(end * longer for end in prediction.ends),
        evaluations=tuple(each * longer for each in prediction.evaluations),
    )


def _within(whole: float, states: Mapping[str, float], before: float) -> dict[str, float]:
    """Shares of `whole` seconds of the states that had these shares of `before` seconds; the rest is idle."""
    if whole <= before:
        return dict(states)
    shares = {state: share * before / whole for state, share in states.items()}
    return {**shares, "idle": shares.get("idle", 0.0) + (whole - before) / whole}
