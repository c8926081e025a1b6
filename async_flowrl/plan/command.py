"""Prediction command of the planner: turns the command line into `Work` and `Limits` and prints the advice.

`plan/__main__.py` calls `predict` when none of `--memory`, `--fit` and `--rehearse` is given.
"""

import argparse
import json
import sys
from dataclasses import replace

from async_flowrl.config.elastic import bounds, elastic
from async_flowrl.config.reward_pools import reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.config.shared_advice import sharing_refusal
from async_flowrl.plan.advise import advise
from async_flowrl.plan.calibrate import calibrate
from async_flowrl.plan.laws import Law
from async_flowrl.plan.limits import Limits
from async_flowrl.plan.prediction import predicted_against_actual
from async_flowrl.plan.show import as_json, text
from async_flowrl.plan.work import EvaluationWork, Work

GIB = 2**30
EVALUATE_EVERY, EVALUATION_PROMPTS = 50, 16
"""Training steps between two evaluations, and prompts of one, where `--evaluation` is given without them."""


def work_of(given: argparse.Namespace) -> tuple[Work, Limits]:
    """Returns the work and the limits that the parsed arguments describe.

    With `--from-run` the durations come from that run's records, otherwise from the numbers on the command line.
    Raises ValueError if both are missing, if the run cannot be read, or for `runtime.backend=local` with several ranks.
    """
    split = given.split
    devices = given.devices or (sum(split) if split else given.cores)
    limits = Limits(
        devices=devices or 2,
        memory=given.store * GIB,
        reward=given.reward_workers or 1,
        split=split,
        steps=given.steps,
        slow=(given.slow_worker,) if given.slow_worker != 1 else (),
        share=not given.no_shared,
        backend=given.backend or "ray",
        cores=given.cores,
    )
    if given.from_run is not None:
        work, limits = from_run(given, limits)
    elif given.generate is None or given.update is None:
        raise ValueError("either --from-run RUN_DIR, or both --generate and --update, are needed")
    else:
        work = from_numbers(given)
    return work, in_one_process(limits) if limits.backend == "local" else limits


def in_one_process(limits: Limits) -> Limits:
    """Returns the limits of `runtime.backend=local`, whose process holds a single trainer rank; a given split stays.

    Raises ValueError for a split with more of them.
    """
    rollout, trainer = limits.split or (max(1, limits.devices - 1), 1)
    if trainer > 1:
        raise ValueError(f"runtime.backend=local has one trainer rank, got --split {rollout}:{trainer}")
    split = limits.split or ((rollout, 1) if limits.devices > 1 else None)
    return replace(limits, split=split, share=limits.share and split is None)


def from_run(given: argparse.Namespace, limits: Limits) -> tuple[Work, Limits]:
    """Returns the measured work of the run `--from-run`; devices and reward workers not given are the run's."""
    run = calibrate(given.from_run.expanduser())
    if elastic(run.config.rollout):
        least, most = bounds(run.config.rollout)
        sys.stderr.write(
            f"plan: the run's rollout pool may have {least} to {most} workers; it is counted as "
            f"rollout.num_workers={run.config.rollout.num_workers}\n"
        )
    devices = given.devices or (sum(given.split) if given.split else given.cores or run.layout.devices)
    backend = given.backend or run.config.runtime.backend
    limits = replace(limits, share=limits.share and _may_share(run.config, backend, devices))
    pools = reward_pools(run.config.reward)
    limits = replace(
        limits,
        devices=devices,
        reward=(given.reward_workers or run.layout.reward) if run.layout.reward else 0,
        own_rewards=run.layout.own_rewards,
        reward_gpus={pool.name: pool.gpus_per_worker for pool in pools},
        backend=backend,
    )
    return replace(run.work, serial=given.serial), limits


def _may_share(config: Config, backend: str, devices: int) -> bool:
    """Returns True if the run could have one pool on so many devices; otherwise it says why not, on stderr."""
    config = replace(config, runtime=replace(config.runtime, backend=backend))
    refusal = None if backend == "local" else sharing_refusal(config, devices)  # Threads: see `in_one_process`.
    if refusal:
        sys.stderr.write(f"plan: one pool that does both is left out: {refusal}\n")
    return refusal is None


def evaluation_of(given: argparse.Namespace) -> EvaluationWork | None:
    """Divides the device-seconds of an evaluation among its prompts; None without `--evaluation`.

    Raises ValueError if only other options of evaluations are given.
    """
    if not given.evaluation:
        if alone := [name for name in ("evaluate_every", "evaluation_prompts") if getattr(given, name) is not None]:
            raise ValueError(f"--{alone[0].replace('_', '-')} needs --evaluation, the device-seconds of one evaluation")
        return None
    prompts = given.evaluation_prompts or EVALUATION_PROMPTS
    return EvaluationWork(given.evaluate_every or EVALUATE_EVERY, prompts, Law(given.evaluation / prompts, given.cv))


def from_numbers(given: argparse.Namespace) -> Work:
    """Divides the device-seconds per step among tickets and groups.

    Raises ValueError for an uneven ticket size, and as `evaluation_of`.
    """
    size = given.group_size
    ticket = given.ticket_size or size
    if size % ticket:
        raise ValueError(f"--ticket-size {ticket} must divide --group-size {size}")
    per_group, groups, together = size // ticket, given.prompts, given.tickets_per_batch
    if together > groups * per_group:
        raise ValueError(f"--tickets-per-batch {together}, but a step has {groups * per_group} tickets")
    costs, shares = given.costs
    if together > 1 and costs:
        raise ValueError("--tickets-per-batch above 1 needs images of one size, so it cannot be combined with --costs")
    return Work(
        prompts_per_step=groups,
        tickets_per_group=per_group,
        tickets_per_batch=together,
        costs=costs,
        cost_shares=shares,
        group_size=size,
        generate=Law(given.generate / (groups * per_group), given.cv),
        update=Law(given.update / groups, given.update_cv),
        score=Law(given.reward, given.reward_cv),
        stage=Law(given.stage),
        deliver=Law(given.sync),
        serial=given.serial,
        evaluation=evaluation_of(given),
        ticket_bytes=int(given.image_megabytes * 1e6) * ticket,
        adapter_bytes=int(given.adapter_megabytes * 1e6),
    )


def predict(given: argparse.Namespace) -> int:
    """Prints the plan that the arguments ask for. Returns the exit code: 0, or 2 if no plan can be made."""
    try:
        advice = advise(*work_of(given))
    except ValueError as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    compared = predicted_against_actual(given.from_run.expanduser()) if given.from_run is not None else None
    if given.json:
        sys.stdout.write(json.dumps({**as_json(advice), "run": compared}, indent=2) + "\n")
        return 0
    sys.stdout.write(text(advice))
    if compared:
        sys.stdout.write(f"The run itself: {compared['sentence']}.\n")
    return 0
