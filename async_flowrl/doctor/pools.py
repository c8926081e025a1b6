"""Check `pools`: memory and speed of a rollout worker and then of a trainer rank, on the first device.

Both use the random model. Peak memory is compared with the memory plan, and speed with the device's peak.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from async_flowrl.config.schema import Config
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, WARNING, Finding
from async_flowrl.doctor.model import configuration
from async_flowrl.doctor.setting import Setting
from async_flowrl.memory.processes import MARGIN_SHARE, Footprint, plan_memory
from async_flowrl.observability.flops import device_peak
from async_flowrl.observability.mfu import utilisation
from async_flowrl.rollout.worker import RolloutWorker
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.worker import TrainerWorker
from async_flowrl.types import POLICY, Span, Trajectory
from checkpoint_engine import Publisher

GIB = 2**30
JUDGED_FROM = GIB
"""Peak in bytes from which a plan is judged; smaller peaks are mostly workspaces of libraries."""
MAX_PLAN_ERROR = 0.10
"""Largest relative error of a planned peak, a share of the plan, without a warning."""
LOW_MFU = 0.15
"""MFU (model FLOPs utilisation) that full-sized layers in bfloat16 exceed on a free, cool device."""


@dataclass(frozen=True)
class Worked:
    """Measurements of one pool, without the first round. `peak` is in bytes above what the process held before."""

    peak: int
    seconds: float
    """Median seconds of a round."""
    flops: float | None
    """Floating-point operations of a round; None if unknown."""
    images: int
    """Images (for a trainer: samples trained on) per round."""


def check(setting: Setting, seconds: float) -> Iterator[Finding]:
    """Yields memory and speed of both pools. An error in a pool ends the check."""
    prepared = prepare(configuration(setting))
    plan = plan_memory(prepared.at_largest)
    rollout, trajectories = rolled_out(prepared, setting.sizes.rounds)
    yield memory_finding("rollout worker", rollout, plan.rollout, pretended=setting.pretended)
    yield speed_finding("rollout worker", rollout, setting, what="images")
    gc.collect()
    torch.cuda.empty_cache()
    trainer = trained(prepared, trajectories, setting.sizes.rounds)
    yield memory_finding("trainer rank", trainer, plan.trainer, pretended=setting.pretended)
    yield speed_finding("trainer rank", trainer, setting, what="samples")


def rolled_out(prepared: Prepared, rounds: int) -> tuple[Worked, list[Trajectory]]:
    """Generates one step's tickets `rounds` times on a worker that holds all versions it can need.

    Returns the measurements and the trajectories of the last round.
    """
    config, before = prepared.config, start()
    worker = RolloutWorker(config, prepared.model, 0, "rollout-0")
    worker.load()
    deliver(worker, config.live_versions)
    requests = [prepared.requests.request(ticket) for ticket in tickets(config)]
    spans: list[Span] = []
    trajectories: list[Trajectory] = []

    def generate() -> None:
        spans.clear()
        trajectories.clear()
        for request in requests:
            report, _, trajectory = worker.generate(request)
            spans.extend(report.spans)
            trajectories.extend([trajectory] if trajectory is not None else [])

    seconds = timed(generate, rounds)
    return Worked(peak_since(before), seconds, total(spans), images(config)), trajectories


def deliver(worker: RolloutWorker, versions: int) -> None:
    """Delivers `versions` versions, all with the weights that the worker was loaded with."""
    weights = {name: tensor.detach().clone() for name, tensor in worker.engine.live_tensors().items()}
    receiver = worker.receiver
    publisher = Publisher({name: t.cpu() for name, t in weights.items()}, alpha=receiver.alpha, rank=receiver.rank)
    for version in range(versions):
        publisher.stage(version)
        publisher.seal(version)
        worker.receiver.receive(*publisher.payload(version))


def trained(prepared: Prepared, trajectories: Sequence[Trajectory], rounds: int) -> Worked:
    """Trains a single rank on the same trajectories in every round, as if they were new."""
    config, before = prepared.config, start()
    worker = TrainerWorker(config, prepared.model, 0, "trainer-0")
    worker.load()
    worker.sender.stage(0, POLICY)
    plan = StepPlan(rows=images(config) * trained_steps(config))
    spans: list[Span] = []
    steps = iter(range(rounds + 1))

    def update() -> None:
        spans.clear()
        step = next(steps)
        metas = tuple(meta(config, group, step) for group in range(config.prompts_per_step))
        stats = worker.train(TrainRequest(step, metas, begins=plan, finishes=True), *trajectories)
        spans.extend(stats.spans if isinstance(stats, UpdateStats) else ())

    seconds = timed(update, rounds)
    return Worked(peak_since(before), seconds, total(spans), images(config))


def tickets(config: Config) -> list[Ticket]:
    """Returns the tickets of the first step, one whole group each."""
    return [Ticket(TRAIN, group, 0, group, 0, 0) for group in range(config.prompts_per_step)]


def meta(config: Config, group: int, step: int) -> GroupMeta:
    """Returns the metadata of a group for this step of one_step_off.

    Its advantages are random and depend on step and group.
    """
    size, version = config.group_size, max(0, step - config.max_staleness)
    advantages = np.random.default_rng([step, group]).standard_normal(size)
    return GroupMeta(
        group=group,
        tickets=1,
        version=version,
        age=step - version,
        advantages=tuple((advantages - advantages.mean()).tolist()),
        selected=tuple(range(size)),
        seeds=tuple(range(size)),
        negative=config.rollout.negative_prompt,
        sampling=sampling(config),
    )


def images(config: Config) -> int:
    """Returns the number of images per training step."""
    return config.prompts_per_step * config.group_size


def start() -> int:
    """Resets the peak counter; returns the bytes in use now."""
    torch.cuda.reset_peak_memory_stats(0)
    return torch.cuda.memory_allocated(0)


def peak_since(before: int) -> int:
    return torch.cuda.max_memory_allocated(0) - before


def timed(work: Callable[[], Any], rounds: int) -> float:
    """Returns the median seconds of a round, with the device's work finished; a first round is not counted."""
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def total(spans: Sequence[Span]) -> float | None:
    """Returns the sum of the spans' FLOPs; None if no span has them."""
    known = [span.flops for span in spans if span.flops is not None]
    return sum(known) if known else None


def memory_finding(pool: str, worked: Worked, plan: Footprint, *, pretended: bool = False) -> Finding:
    """Compares the allocator's peak with the plan without its margin.

    It is a failure if the peak exceeds the plan and its margin, a warning if they differ by more than MAX_PLAN_ERROR.
    """
    planned = sum(plan.parts.values())
    ratio = planned / worked.peak
    sentence = f"planned {planned / GIB:.3f} GiB, peak {worked.peak / GIB:.3f} GiB, ratio {ratio:.3f}"
    name, figures = f"memory of a {pool}", {"planned": planned, "peak": worked.peak, "parts": dict(plan.parts)}
    if pretended or worked.peak < JUDGED_FROM:
        return Finding(name, OK, f"{sentence} (too small to be judged)", figures=figures)
    if worked.peak > planned * (1 + MARGIN_SHARE):
        advice = "runs may need more memory than `plan --memory` says: leave room, and send the report"
        return Finding(name, FAILED, sentence, advice, figures)
    if abs(ratio - 1) > MAX_PLAN_ERROR:
        advice = f"`plan --memory` is off by more than {MAX_PLAN_ERROR:.0%} here; send the report"
        return Finding(name, WARNING, sentence, advice, figures)
    return Finding(name, OK, sentence, figures=figures)


def speed_finding(pool: str, worked: Worked, setting: Setting, *, what: str) -> Finding:
    """Reports images or samples per second, and the MFU if the device's peak is known."""
    rate = worked.images / worked.seconds
    share = utilisation(worked.flops, worked.seconds, device_peak()) if worked.flops is not None else None
    name = f"speed of a {pool}"
    figures = {f"{what}_per_second": rate, "seconds": worked.seconds, "flops": worked.flops, "mfu": share}
    sentence = f"{rate:.3g} {what}/s"
    if setting.pretended:
        return Finding(name, SKIPPED, "CPU kernels computed this", "needs a real device", figures)
    if share is None:
        return Finding(name, OK, f"{sentence}; MFU not known", figures=figures)
    sentence += f", MFU {share:.1%}"
    if setting.small:
        return Finding(name, OK, f"{sentence} (too small to be judged)", figures=figures)
    if share < LOW_MFU:
        advice = "look at nvidia-smi for another process, heat or a power limit, then send the report"
        return Finding(name, WARNING, sentence, advice, figures)
    return Finding(name, OK, sentence, figures=figures)
