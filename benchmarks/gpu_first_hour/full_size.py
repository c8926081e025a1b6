"""Stages `full` and `compiled`: memory against the plan and speed of a rollout worker, then of a trainer rank.

Both run in this process, one after the other, with Qwen-Image of full size and random weights (random_qwen.py).
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.processes import MARGIN_SHARE, Footprint, plan_memory
from async_flowrl.observability.flops import device_peak
from async_flowrl.observability.mfu import utilisation
from async_flowrl.rollout.worker import RolloutWorker
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.training.messages import StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.worker import TrainerWorker
from async_flowrl.types import POLICY, Conditioning, Span, Trajectory, Wording
from benchmarks.gpu_first_hour.random_qwen import real_card, settings, sizes_here
from benchmarks.gpu_first_hour.task import Task
from benchmarks.single_workers import meta, tickets
from checkpoint_engine import Publisher

GIB = 2**30
ROUNDS = 1
"""Measured rounds; one more before them is not counted."""
SHOWN_KERNELS = 12
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Worked:
    """Measurements of one pool. `peak` is in bytes above what the process held before."""

    peak: int
    seconds: float
    """Median seconds of a round."""
    flops: float | None
    """Floating-point operations of a round; None if unknown."""
    profiled: dict[str, Any]
    """What the profiler saw in one more round; empty on a CPU."""


def full(task: Task) -> None:
    measured(task)


def compiled(task: Task) -> None:
    measured(task, "rollout.compile=true", "trainer.compile=true")


def measured(task: Task, *further: str) -> None:
    """Says plan, peak and speed of both pools. The peak is not ok if it exceeds the plan with its margin."""
    words = [*settings(task.work, sizes_here()), "placement=separate", *further, *task.words]
    prepared = prepare(compose_config("one_step_off", [*words, f"output_dir={task.work / 'none'}"]))
    plan = plan_memory(prepared.at_largest)
    rollout, trajectories, negatives = rolled_out(prepared, ROUNDS)
    report(task, "rollout worker", rollout, plan.rollout, images(prepared.config))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trainer = trained(prepared, trajectories, negatives, ROUNDS)
    report(task, "trainer rank", trainer, plan.trainer, images(prepared.config))


def report(task: Task, pool: str, worked: Worked, plan: Footprint, count: int) -> None:
    """Says the figures of one pool; only a real card gives the peak a verdict."""
    planned = sum(plan.parts.values())
    task.say(
        pool,
        ok=worked.peak <= planned * (1 + MARGIN_SHARE) if real_card() else None,
        planned_gib=planned / GIB,
        peak_gib=worked.peak / GIB,
        reserved_gib=torch.cuda.memory_reserved() / GIB if torch.cuda.is_available() else 0.0,
        seconds=worked.seconds,
        images_per_second=count / worked.seconds,
        petaflop=(worked.flops or 0.0) / 1e15,
        mfu=utilisation(worked.flops, worked.seconds, device_peak()) if worked.flops else None,
        parts_gib={name: size / GIB for name, size in plan.parts.items()},
        profiled=worked.profiled,
    )


def rolled_out(prepared: Prepared, rounds: int) -> tuple[Worked, list[Trajectory], dict[Wording, Conditioning]]:
    """Generates one step's tickets `rounds` times on a worker that holds all versions it can need.

    Returns the measurements, the trajectories of the last round, and the encoded negative prompts.
    """
    config, before = prepared.config, begun()
    worker = RolloutWorker(config, prepared.model, 0, "rollout-0")
    worker.load()
    deliver(worker, config.live_versions)
    requests = [prepared.requests.request(ticket) for ticket in tickets(config, 0)]
    spans: list[Span] = []
    trajectories: list[Trajectory] = []

    def generate() -> None:
        spans.clear()
        trajectories.clear()
        for request in requests:
            answer, _, trajectory = worker.generate(request)
            spans.extend(answer.spans)
            trajectories.extend([trajectory] if trajectory is not None else [])

    negatives: dict[Wording, Conditioning] = {}
    if config.rollout.true_cfg_scale > 1:
        texts = [each.negative_wording(config.rollout.negative_prompt) for each in prepared.requests.train]
        negatives = dict(zip(dict.fromkeys(texts), worker.engine.encode(list(dict.fromkeys(texts))), strict=True))
    seconds = timed(generate, rounds)
    peak = peak_since(before)
    return Worked(peak, seconds, total(spans), profiled(generate)), trajectories, negatives


def deliver(worker: RolloutWorker, versions: int) -> None:
    """Delivers `versions` versions, all with the weights that the worker was loaded with."""
    weights = {name: tensor.detach().cpu() for name, tensor in worker.engine.live_tensors().items()}
    publisher = Publisher(weights, alpha=worker.receiver.alpha, rank=worker.receiver.rank)
    for version in range(versions):
        publisher.stage(version)
        publisher.seal(version)
        worker.receiver.receive(*publisher.payload(version))


def trained(
    prepared: Prepared, trajectories: Sequence[Trajectory], negatives: dict[Wording, Conditioning], rounds: int
) -> Worked:
    """Trains a single rank on the same trajectories in every round, as if they were new."""
    config, before = prepared.config, begun()
    worker = TrainerWorker(config, prepared.model, 0, "trainer-0")
    worker.load()
    worker.sender.stage(0, POLICY)
    worker.update.set_negatives(negatives)
    plan = StepPlan(rows=images(config) * trained_steps(config))
    spans: list[Span] = []
    steps = iter(range(rounds + 2))

    def update() -> None:
        spans.clear()
        step = next(steps)
        metas = tuple(meta(config, ticket) for ticket in tickets(config, step))
        stats = worker.train(TrainRequest(step, metas, begins=plan, finishes=True), *trajectories)
        spans.extend(stats.spans if isinstance(stats, UpdateStats) else ())

    seconds = timed(update, rounds)
    peak = peak_since(before)
    return Worked(peak, seconds, total(spans), profiled(update))


def images(config: Config) -> int:
    """Returns the number of images per training step."""
    return config.prompts_per_step * config.group_size


def begun() -> int:
    """Resets the peak counter; returns the bytes in use now, 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_since(before: int) -> int:
    return torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0


def timed(work: Callable[[], Any], rounds: int) -> float:
    """Returns the median seconds of a round, with the device's work finished; a first round is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def total(spans: Sequence[Span]) -> float | None:
    """Returns the sum of the spans' FLOPs; None if no span has them."""
    known = [span.flops for span in spans if span.flops is not None]
    return sum(known) if known else None


def profiled(work: Callable[[], Any]) -> dict[str, Any]:
    """Does the work once more under torch.profiler: milliseconds of the longest kernels, and the host's waits."""
    if not real_card():
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    averages = seen.key_averages()
    kernels = sorted(averages, key=lambda each: -each.self_device_time_total)[:SHOWN_KERNELS]
    return {
        "kernels_ms": {each.key[:80]: each.self_device_time_total / 1000 for each in kernels},
        "host_waits": {each.key: each.count for each in averages if each.key in HOST_WAITS},
    }
