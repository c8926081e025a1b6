"""Stages made of whole programs: the tiny job, full size, glyphs, and the tests of the repository on a GPU."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour import one_card, sizes
from benchmarks.gpu_first_hour.task import Task

ONE = ("rollout.num_workers=1", "trainer.num_workers=1")
SHARED = (*ONE, "placement=shared")
HALF = (*ONE, "rollout.gpus_per_worker=0.5", "trainer.gpus_per_worker=0.5")
"""One card for two processes."""
LOCAL = (*ONE, "runtime.backend=local")
FAMILIES = {
    "flux": ("model=tiny_flux", "rollout.guidance_scale=3.5"),
    "qwen_image_21": ("model=tiny_qwen_image_21",),
    "sana": ("model=tiny_sana",),
    "sd3": ("model=tiny_sd3",),
    "wan": ("model=tiny_wan21", "rollout.frames=5"),
    "z_image": ("model=tiny_z_image",),
}
TWICE = {"local": (), "bfloat16": ("model.dtype=bfloat16",), "whole weights": ("tune=full",), **FAMILIES}
"""Jobs that are run twice, in one process each."""
TWO_BASES_BYTES = 125 * 2**30
"""Memory of a card from which a trainer rank and a rollout worker both hold Qwen-Image: 113 GiB planned."""
OCR = 0.8
"""Held-out score of the small model that has learned to write; 0.42 before training."""


def tiny(task: Task) -> None:
    """Runs the tiny job in every way that must not, and one that must, change the weights."""
    jobs: dict[str, Sequence[str]] = {"shared": SHARED, "two pools": HALF, "another seed": (*LOCAL, "seed=1")}
    jobs |= {f"{name}{again}": (*LOCAL, *words) for name, words in TWICE.items() for again in ("", " again")}
    with ThreadPoolExecutor(sizes.AT_ONCE) as pool:
        made = dict(zip(jobs, pool.map(lambda name: task.train(name, "total_steps=3", *jobs[name]), jobs), strict=True))
    for name in TWICE:
        task.equal(f"{name}, twice", {each: made[each] for each in (name, f"{name} again")})
    task.equal("shared, two pools, one process", {each: made[each] for each in ("shared", "two pools", "local")})
    task.equal("another seed", {each: made[each] for each in ("local", "another seed")}, equal=False)


def whole(task: Task) -> None:
    """Trains two steps at full size twice: with two bases over NCCL and shared where there is room, else shared."""
    words = [*sizes.settings(sizes.sizes_here()), "total_steps=2", *task.words]
    most = task.left / 2
    if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory >= TWO_BASES_BYTES:
        pair = ("placement=separate", "checkpoint_engine.transport=nccl")
        over_nccl = task.train("two pools over NCCL", *words, *pair, most=most, **one_card.environment(2))
        second = task.train("shared", *words, most=task.left, **one_card.environment(1))
        task.equal("two pools over NCCL, shared", {"nccl": over_nccl, "shared": second})
        task.say("every version by NCCL", ok=over_nccl is not None and over_nccl["sync"]["fallbacks"] == 0)
        return
    made: dict[str, Mapping[str, Any] | None] = {}
    for name in ("first", "second"):
        peak = ("-m", "benchmarks.gpu_first_hour.peak", str(task.work / f"peak_{name}.json"))
        made[name] = task.train(name, *words, "runtime.backend=local", most=most, prefix=peak)
        if (written := Path(peak[-1])).exists():
            task.say(f"memory of the {name} run", gib=written.read_text())
    task.equal("shared, twice", made)


def glyphs(task: Task) -> None:
    """Trains the small model that learns to write, with two processes on the card; two short runs must be equal."""
    recipe = ("experiment=glyphs", "evaluate.images_per_prompt=4", "evaluate.max_prompts=16", "reward.num_workers=6")
    short = ("experiment=glyphs", "total_steps=20")
    with ThreadPoolExecutor(3) as pool:
        learning = pool.submit(task.train, "glyphs", *recipe, "evaluate.every=60", *HALF)
        first = pool.submit(task.train, "glyphs shared", *short, *SHARED)
        second = pool.submit(task.train, "glyphs two pools", *short, *HALF)
    learned = learning.result()
    curves = learned["evaluations"]["last"]["curves"] if learned else {}
    scores = {name: curve["mean"] for name, curve in curves.items()}
    task.say("held-out OCR", ok=scores.get("reward", 0.0) >= OCR, scores=scores, seconds_on_two_cpu_cores=187)
    task.equal("glyphs shared, two pools", {"shared": first.result(), "two pools": second.result()})


def gpu_tests(task: Task) -> None:
    """Runs tests/gpu; on a machine with a card it is not ok if all of them are skipped."""
    marked = "gpu" if sizes.real_card() else "gpu and not real_gpu"
    command = ("-m", "pytest", "-v", "-m", marked, "tests/gpu", "-p", "no:cacheprovider", "--timeout", "120")
    enough = ("--session-timeout", f"{max(1.0, task.left - 30):.0f}")  # what failed until then is still explained
    failed = task.program("tests_gpu", (*command, *enough), task.left, {})
    log = (task.work / "logs" / "tests_gpu.log").read_text(errors="replace").splitlines()
    named = [line for line in log if line.startswith(("FAILED", "ERROR"))]
    last = log[-1] if log else ""
    good = failed is None and (" passed" in last or not torch.cuda.is_available())
    task.say("tests/gpu", ok=good, last=last, failed=named[:20])
