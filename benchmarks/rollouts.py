"""python -m benchmarks.rollouts [FAMILY ...]: the rollout engine against diffusers' own pipeline, each family.

Both make as many images of a tiny model with an adapter in one process, in turns; text is encoded once for both. The
pipeline, with PEFT's own adapter, denoises and decodes; the engine also draws noise at every step, computes log-probs
and records the trajectory. CPU seconds stay true on a machine that is busy with other things.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from peft import LoraConfig

from async_flowrl.config.resolution import asked_resolution
from async_flowrl.generate import Settings, run_pipeline
from async_flowrl.policies.lora import lora_modules
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Resolution
from benchmarks.page import markdown_table
from tests.support.families import NAMES, TEXT, adapted, how, model_config, pipeline_of
from tests.support.tiny import request

STEPS, IMAGES = 6, 8
PROMPTS = (TEXT, "a red house beside a long river, seen from far above on a bright morning")
"""Of different length."""


def compare(family: str, size: Resolution, cfg: float, rounds: int) -> tuple[float, float, float]:
    """(engine's rate over the pipeline's, CPU seconds of the engine, of the pipeline), per ticket of IMAGES images."""
    sampling = replace(how(family, cfg=cfg), resolution=size, num_inference_steps=STEPS)
    engine, pipeline = DiffusersEngine(adapted(family)), pipeline_of(family)
    pipeline.transformer.add_adapter(
        LoraConfig(r=4, lora_alpha=10, target_modules=list(lora_modules(engine.policy.transformer)))
    )
    pipeline.encode_prompt = remembered(pipeline.encode_prompt)
    settings = Settings(replace(model_config(family), family=family), sampling)
    tickets = [request(IMAGES, how=sampling, prompt=replace(request().prompt, text=text)) for text in PROMPTS]
    contestants: tuple[Callable[[], Any], ...] = (
        lambda: [engine.generate(ticket) for ticket in tickets],
        lambda: [run_pipeline(pipeline, settings, text, num_images_per_prompt=IMAGES) for text in PROMPTS],
    )
    taken = [[cpu_seconds(run) / len(PROMPTS) for run in contestants] for _ in range(rounds + 1)][1:]
    return median(b / a for a, b in taken), min(a for a, _ in taken), min(b for _, b in taken)


def remembered(encode: Callable[..., Any]) -> Callable[..., Any]:
    """The pipeline's `encode_prompt`, which computes each call once."""
    known: dict[str, Any] = {}

    def again(*positional: Any, **named: Any) -> Any:
        key = repr((positional, named))
        if key not in known:
            known[key] = encode(*positional, **named)
        return known[key]

    return again


def cpu_seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--resolution", default="32x64", metavar="SIZE")
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    size = asked_resolution(given.resolution)
    rows = []
    for family in given.families or NAMES:
        rate, ours, theirs = compare(family, size, given.guidance, given.rounds)
        rows.append((family, f"{rate:.3f}", f"{ours:.3f}", f"{theirs:.3f}"))
    head = "family", "engine ÷ pipeline, CPU seconds", "engine, s per ticket", "pipeline, s per ticket"
    sys.stdout.write(markdown_table(head, rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
