"""The first lines of a run: what was understood, who sits where, and where the run can be watched."""

import asyncio
import logging
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch

from async_flowrl.config.schema import LORA, Config, RewardTerm
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.terminal import say
from async_flowrl.observability.wrapped import named_lines
from async_flowrl.run.launch import pools
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.tools import ForetellMemory, ForetellSteps

logger = logging.getLogger(__name__)

Rows = list[tuple[str, str]]
"""A name and a sentence each."""


def first_lines(prepared: Prepared, directory: Path) -> str:
    """What a person reads before anything is started; nothing where the console is quiet."""
    config = prepared.config
    if config.console == "quiet":
        return ""
    where = os.path.relpath(directory) if directory.is_relative_to(Path.cwd()) else str(directory)
    rows = [
        ("run", run_of(config)),
        ("model", model_of(prepared)),
        *inputs(prepared),
        ("devices", devices(prepared)),
        ("files", f"{where}; to watch it in a browser: async-flowrl report {shlex.quote(where)} --live"),
    ]
    return _lines(rows)


def describe_inputs(prepared: Prepared) -> str:
    """The prompts and the reward alone, for dry_run, which has tables for the rest."""
    return _lines(inputs(prepared))


def inputs(prepared: Prepared) -> Rows:
    terms = prepared.config.reward.terms
    return [
        ("training", training(prepared)),
        ("evaluation", evaluation(prepared)),
        ("reward", " + ".join(_term(key, term) for key, term in terms.items()).replace("+ -", "- ")),
    ]


def _lines(rows: Rows) -> str:
    return named_lines(rows, 10)


OVERLAP = {
    "sync": "generate, then train",
    "stream": "a group is trained while others of its step are generated",
    "one_step_off": "the next step is generated while one is trained",
    "fully_async": "generation runs ahead while steps are trained",
}
"""Mode → what happens at the same time."""


def run_of(config: Config) -> str:
    """How long, how much in each step, and what overlaps."""
    images = config.prompts_per_step * config.group_size
    age = f", images at most {config.max_staleness} version{'s' * (config.max_staleness > 1)} old"
    return (
        f"{config.total_steps} steps of {images} images ({config.prompts_per_step} prompts × {config.group_size}); "
        f"{config.mode_name}: {OVERLAP[config.mode_name]}{age if config.max_staleness else ''}"
    )


def model_of(prepared: Prepared) -> str:
    config, model = prepared.config, prepared.model
    start = "" if config.lora.path is None else f", from {config.lora.path}"
    trained = f"LoRA of rank {config.lora.rank}{start}" if config.tune == LORA else "full weights"
    return (
        f"{config.model.path} ({model.family}, {model.dtype}, {prepared.sizes_in_words}), "
        f"{trained}, by {prepared.algorithm.name}"
    )


def devices(prepared: Prepared) -> str:
    """Workers of every pool and what each sits on; of somebody else's cluster, what it is asked for."""
    config = prepared.config
    said = [
        f"{spec.name} {spec.size} × {seat(spec.gpus_per_worker, spec.threads, gpus(config))}"
        for spec in pools(prepared)
    ]
    shared = "; rollout and trainer share theirs" if config.placement == "colocated" else ""
    where = {"local": "threads of this process"}.get(config.runtime.backend, "")
    where = where or ("this machine" if config.runtime.address is None else f"cluster {config.runtime.address}")
    return f"{', '.join(said)}{shared} ({where})"


def seat(gpus_per_worker: float, threads: int, known: float | None) -> str:
    """`known`: GPUs there are; None where only the cluster knows."""
    cores = f"{threads} CPU thread{'s' * (threads > 1)}"
    if gpus_per_worker == 0 or known == 0:
        return cores
    gpu = f"{gpus_per_worker:g} GPU{'s' * (gpus_per_worker > 1)}"
    return gpu if known is not None else f"{gpu}, if it has any"


def gpus(config: Config) -> float | None:
    """GPUs that the run can have; None where only the cluster knows."""
    if config.runtime.backend == "local":
        return float(torch.cuda.device_count())
    if config.runtime.address is not None:
        return None
    from separation.ray_session import gpus_here

    return gpus_here()


async def say_step_time(foretell: ForetellSteps, config: Config, directory: RunDirectory) -> None:
    """One line more; the planner is loaded only where there is something to plan from."""
    if config.console == "quiet":
        return
    sentence = "no step time: no earlier steps here"
    if directory.events.exists():
        sentence = await asyncio.to_thread(foretell, config, directory.root)
    say(_lines([("predicted", sentence)]))


async def say_memory(foretell: ForetellMemory, config: Config, memory: Mapping[str, int]) -> None:
    """One line more, when the planner has it: half a minute for a large model, which loads meanwhile."""
    if config.console == "quiet":
        return
    sentence = await asyncio.to_thread(foretell, config, memory) if memory else "no memory: no GPU to plan"
    say(_lines([("predicted", sentence)]))


def training(prepared: Prepared) -> str:
    """The training prompts: how many, of which file, how they are drawn."""
    config, prompts = prepared.config.data, prepared.data.train
    said = [f"{_count(len(prompts))} of {prompts.rows.path}"]
    if prompts.duplicates:
        said.append(f"{prompts.duplicates:,} of them duplicates by their text")
    if prompts.rows.left_out:
        said.append(f"without the columns {', '.join(prompts.rows.left_out)}, which hold bytes")
    if config.weight_key is not None:
        said.append(f"drawn in proportion to {config.weight_key!r}")
    if config.curriculum.after is not None:
        said.append(f"set aside where the last {config.curriculum.after} of their groups had no spread of rewards")
    return ", ".join(said)


def evaluation(prepared: Prepared) -> str:
    """The prompts of evaluations, and whether they are held out."""
    chosen, shared = prepared.requests.evaluation, prepared.requests.shared
    if prepared.data.evaluation is prepared.data.train:
        return f"{len(chosen)} of {prepared.data.chosen}"
    if shared:
        return f"{_count(len(chosen))} {prepared.data.chosen}; {shared} of them are training prompts, so not held out"
    return f"{_count(len(chosen)).replace(' prompt', ' held-out prompt')}, {prepared.data.chosen}"


def _count(number: int) -> str:
    return f"{number:,} prompt{'' if number == 1 else 's'}"


def _term(key: str, term: RewardTerm) -> str:
    said = [term.name] if term.name not in (None, key) else []
    said += [] if term.required else ["not required"]
    return f"{term.weight:g} × {key}" + (f" ({', '.join(map(str, said))})" if said else "")
