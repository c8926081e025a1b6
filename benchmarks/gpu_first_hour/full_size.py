"""Stages at full size: memory against the plan and speed of a rollout worker, then of a trainer rank.

Both run in this process, one after the other, with random weights (sizes.py).
"""

import gc
import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import MARGIN_SHARE, Footprint, plan_memory
from async_flowrl.observability.flops import device_peak
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.tickets.table import TRAIN, Ticket
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest
from async_flowrl.training.parts import cut
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.types import POLICY, Conditioning, EncoderInput, Span, Trajectory
from benchmarks.gpu_first_hour.probe import timed
from benchmarks.gpu_first_hour.sizes import real_card, settings, sizes_here
from benchmarks.gpu_first_hour.task import Task
from checkpoint_engine import Publisher
from separation.worker_process import ALLOCATOR_NAMES

GIB = 2**30
ROUNDS, SHOWN_KERNELS = 1, 12
"""Measured rounds, after one that is not counted; kernels that are listed."""
Figures = dict[str, Any]
HOST_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


OTHERS = {
    "Qwen-Image without guidance": ("qwen_image", "rollout.true_cfg_scale=1"),
    "SD 3.5 medium": ("sd35_medium", "rollout.true_cfg_scale=4.5"),
    "SD 3.5 medium without guidance": ("sd35_medium", "rollout.true_cfg_scale=1"),
    "FLUX.1-dev": ("flux_dev", "rollout.true_cfg_scale=1", "rollout.guidance_scale=3.5"),
}
"""What stage `others` measures → model and settings."""


def full(task: Task) -> None:
    measured(task)


def compiled(task: Task) -> None:
    measured(task, "rollout.compile=true", "trainer.compile=true")


def others(task: Task) -> None:
    for title, (model, *words) in OTHERS.items():
        measured(task, *words, title=f"{title}, ", model=model)


def measured(task: Task, *further: str, title: str = "", model: str = "qwen_image") -> None:
    """Says plan, peak and speed of both pools. Not ok: PyTorch reserves more than the plan with its margin."""
    if real_card() and not any(map(os.environ.get, ALLOCATOR_NAMES)):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # as in a worker that Ray starts
    words = [*settings(sizes_here(), model), "placement=separate", *further, *task.words]
    prepared = prepare(precheck(compose_config("one_step_off", [*words, f"output_dir={task.work / 'none'}"])))
    plan = plan_memory(prepared.at_largest)
    count = prepared.config.prompts_per_step * prepared.config.group_size
    rollout, trajectories, negatives = rolled_out(prepared, ROUNDS)
    report(task, f"{title}rollout worker", rollout, plan.rollout, count)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trainer = trained(prepared, trajectories, negatives, ROUNDS)
    report(task, f"{title}trainer rank", trainer, plan.trainer, count)
    del trainer, trajectories, negatives
    gc.collect()


def report(task: Task, pool: str, worked: Figures, plan: Footprint, count: int) -> None:
    """Says the figures of one pool; only a real card gives the peak a verdict."""
    planned, seconds, flops = sum(plan.parts.values()), worked["seconds"], worked["flops"]
    task.say(
        pool,
        ok=worked["reserved_gib"] * GIB <= planned * (1 + MARGIN_SHARE) if real_card() else None,
        planned_gib=planned / GIB,
        images_per_second=count / seconds,
        mfu=flops / seconds / peak if flops and (peak := device_peak()) else None,
        **worked,
        parts_gib={name: size / GIB for name, size in plan.parts.items()},
    )


def rolled_out(prepared: Prepared, rounds: int) -> tuple[Figures, list[Trajectory], dict[EncoderInput, Conditioning]]:
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
            (answer,), _, trajectory = worker.generate([request])
            spans.extend(answer.spans)
            trajectories.extend([trajectory] if trajectory is not None else [])

    negatives: dict[EncoderInput, Conditioning] = {}
    if config.rollout.true_cfg_scale > 1:
        texts = [each.negative_wording(config.rollout.negative_prompt) for each in prepared.requests.train]
        negatives = dict(zip(dict.fromkeys(texts), worker.engine.encode(list(dict.fromkeys(texts))), strict=True))
    return figures(generate, rounds, before, spans), trajectories, negatives


def deliver(worker: RolloutWorker, versions: int) -> None:
    """Delivers `versions` versions, all with the weights that the worker was loaded with."""
    weights = {name: tensor.detach().cpu() for name, tensor in worker.engine.live_tensors().items()}
    publisher = Publisher(weights, alpha=worker.receiver.alpha, rank=worker.receiver.rank)
    for version in range(versions):
        publisher.stage(version)
        publisher.seal(version)
        worker.receiver.receive(*publisher.payload(version))


def trained(
    prepared: Prepared, trajectories: Sequence[Trajectory], negatives: dict[EncoderInput, Conditioning], rounds: int
) -> Figures:
    """Trains a single rank on the same trajectories in every round, as if they were new."""
    config, before = prepared.config, begun()
    worker = TrainerWorker(config, prepared.model, 0, "trainer-0")
    worker.load()
    worker.sender.stage(0, POLICY)
    worker.update.set_negatives(negatives)
    selected = worker.algorithm.select(np.arange(config.group_size, dtype=np.float64))
    plan = StepPlan(rows=config.prompts_per_step * len(selected) * trained_steps(config))
    spans: list[Span] = []
    steps = iter(range(rounds + 2))

    def update() -> None:
        spans.clear()
        step = next(steps)
        metas = tuple(meta(config, ticket) for ticket in tickets(config, step))
        worker.train(TrainRequest(step, metas, begins=plan), *trajectories)
        if worker.add_up(TrainRequest(step, ())) is None:
            spans.extend(worker.take_step().spans)

    return figures(update, rounds, before, spans)


def tickets(config: Config, step: int) -> list[Ticket]:
    """The tickets of a step, a whole group each."""
    groups, version = config.prompts_per_step, max(0, step - config.max_staleness)
    return [Ticket(TRAIN, step * groups + group, step, group, 0, version) for group in range(groups)]


def meta(config: Config, ticket: Ticket) -> GroupMeta:
    """The metadata of a ticket's group; its advantages are random and depend on step and group."""
    size = config.group_size
    drawn = np.random.default_rng([ticket.step, ticket.group]).standard_normal(size)
    return GroupMeta(
        group=ticket.group,
        tickets=1,
        version=ticket.version,
        age=ticket.step - ticket.version,
        advantages=tuple((drawn - drawn.mean()).tolist()),
        parts=cut(range(size), config.trainer.micro_batch_size),
        seeds=tuple(range(size)),
        negative=config.rollout.negative_prompt,
        sampling=sampling(config),
    )


def begun() -> int:
    """Resets the peak counter; returns the bytes in use now, 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def figures(work: Callable[[], Any], rounds: int, before: int, spans: Sequence[Span]) -> Figures:
    """Returns median seconds of a round, its FLOPs (from the `spans` that it fills), and the peak above `before` bytes.

    A first round is not counted; one more is done under the profiler.
    """
    cuda = torch.cuda.is_available()
    taken = [timed(work) for _ in range(rounds + 1)]
    told = {"seconds": median(taken[1:]), "flops": sum(span.flops or 0.0 for span in spans)}
    told |= {"peak_gib": (torch.cuda.max_memory_allocated() - before) / GIB if cuda else 0.0}
    told |= {"reserved_gib": torch.cuda.max_memory_reserved() / GIB if cuda else 0.0}
    return {**told, "profiled": profiled(work)}


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
