"""First lines that a run prints: its settings, its prompts and devices, and its folder."""

import logging
import os
from pathlib import Path

import torch

from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.controller.resume import START, Resume
from async_flowrl.observability.terminal import named_lines
from async_flowrl.rewards.registry import resolve_term
from async_flowrl.run.nodes import LABEL_CHARACTERS
from async_flowrl.run.pools import outline
from async_flowrl.run.prepare import Prepared, doubts_of
from async_flowrl.tickets.arithmetic import shape, stored_bytes

logger = logging.getLogger(__name__)

Rows = list[tuple[str, str]]  # (label, sentence) of each line.


def first_lines(prepared: Prepared, directory: Path, resume: Resume = START) -> str:
    config = prepared.config
    if config.console == "quiet":
        return ""
    rows = [
        ("run", run_of(config)),
        ("model", model_of(prepared)),
        *inputs(prepared),
        *resumed(resume),
        ("devices", devices(prepared)),
        ("files", shown(directory)),
    ]
    return named_lines(rows, LABEL_CHARACTERS)


def shown(path: Path) -> str:
    return min(str(path), os.path.relpath(path), key=len)


def dry_run_lines(prepared: Prepared, directory: Path, resume: Resume = START) -> str:
    config, plan = prepared.config, shape(prepared.config)
    payload = stored_bytes(prepared.at_largest, prepared.shapes) / 1e6
    guidance = config.rollout.guidance_scale or config.rollout.true_cfg_scale
    rows = [
        ("sampling", f"{config.rollout.num_inference_steps} denoising steps, guidance {guidance:g}"),
        ("optimizer", f"learning rate {config.trainer.learning_rate:g}"),
        ("tickets", f"{plan.tickets_per_step} of {config.images_per_ticket} images a step"),
        ("payload", f"at most {payload:.1f} MB in the object store"),
    ]
    terms = config.reward.terms | config.evaluate.reward.terms
    others = {key: term for key, term in terms.items() if term.serve is None}  # the run starts no server for them
    if servers := [key for key, term in others.items() if hasattr(resolve_term(key, term), "wants_server")]:
        rows.append(("not asked", f"servers of {', '.join(servers)}: whether they answer shows when the run scores"))
    warnings = "".join(f"WARNING: {sentence}\n" for sentence in doubts_of(prepared))
    return f"{first_lines(prepared, directory, resume)}{named_lines(rows, LABEL_CHARACTERS)}{warnings}"


def resumed(resume: Resume) -> Rows:
    if resume.path is None:
        return []
    goes_on = f"goes on after step {resume.version}, from {resume.path}"
    return [("resume", goes_on), *(("forced", difference) for difference in resume.forced)]


def inputs(prepared: Prepared) -> Rows:
    terms = prepared.config.reward.terms
    return [
        ("training", training(prepared)),
        ("evaluation", evaluation(prepared)),
        ("reward", " + ".join(_term(key, term) for key, term in terms.items()).replace("+ -", "- ")),
    ]


# Mode → description of the work that overlaps.
OVERLAP = {
    "sync": "generate, then train",
    "stream": "a group is trained while others of its step are generated",
    "one_step_off": "the next step is generated while one is trained",
    "fully_async": "generation runs ahead while steps are trained",
}


def run_of(config: Config) -> str:
    images = config.prompts_per_step * config.group_size
    age = f", images at most {config.max_staleness} version{'s' * (config.max_staleness > 1)} old"
    return (
        f"{config.total_steps} steps of {images} images ({config.prompts_per_step} prompts × {config.group_size}); "
        f"{config.mode_name}: {OVERLAP[config.mode_name]}{age if config.max_staleness else ''}"
    )


def model_of(prepared: Prepared) -> str:
    config, model = prepared.config, prepared.model
    stored = "" if model.quantize is None else f" with the base in {model.quantize}"
    return (
        f"{config.model.path} ({'random weights, ' * model.random}{model.family}, {model.dtype}{stored}, "
        f"{prepared.sizes_in_words}), "
        f"{config.trained_in_words}, by {prepared.algorithm.name}"
    )


def devices(prepared: Prepared) -> str:
    config = prepared.config
    there, pools = gpus(config), outline(config)
    clauses = [f"{pool.name} {pool.size} × {seat(pool.gpus_per_worker, pool.threads, there)}" for pool in pools]
    where = "this machine" if config.runtime.address is None else f"cluster {config.runtime.address}"
    where = "threads of this process" if config.runtime.in_threads else where
    return f"{', '.join(clauses)}{placement_of(config).note} ({where})"


def seat(gpus_per_worker: float, threads: int, gpus: float | None) -> str:
    """Describes the resources of one worker. `gpus`: number of GPUs there are, None if only the cluster knows it."""
    cores = f"{threads} CPU thread{'s' * (threads > 1)}"
    if gpus_per_worker == 0 or gpus == 0:
        return cores
    gpu = f"{gpus_per_worker:g} GPU{'s' * (gpus_per_worker > 1)}"
    return gpu if gpus is not None else f"{gpu}, if it has any"


def gpus(config: Config) -> float | None:
    if config.runtime.in_threads:
        return float(torch.cuda.device_count())
    if config.runtime.address is not None:
        return None
    from separation.ray_internals import gpus_here

    return gpus_here()


def training(prepared: Prepared) -> str:
    config, prompts = prepared.config.data, prepared.data.train
    clauses = [f"{_count(len(prompts))} of {prompts.rows.path}"]
    if prompts.duplicates:
        clauses.append(f"{prompts.duplicates:,} of them duplicates by their text")
    if cut := prepared.cut:
        clauses.append(f"{cut:,} of them longer than the text encoder reads (model.max_sequence_length) and cut")
    if prompts.rows.left_out:
        clauses.append(f"without the columns {', '.join(prompts.rows.left_out)}, which hold bytes")
    if config.weight_key is not None:
        clauses.append(f"drawn in proportion to {config.weight_key!r}")
    if config.curriculum.after is not None:
        clauses.append(f"set aside where the last {config.curriculum.after} of their groups had no spread of rewards")
    return ", ".join(clauses)


def evaluation(prepared: Prepared) -> str:
    chosen, shared = prepared.requests.evaluation, prepared.requests.shared
    if prepared.data.evaluation is prepared.data.train:
        return f"{len(chosen)} of {prepared.data.chosen}"
    if shared:
        return f"{_count(len(chosen))} {prepared.data.chosen}; {shared} of them are training prompts, so not held out"
    return f"{_count(len(chosen)).replace(' prompt', ' held-out prompt')}, {prepared.data.chosen}"


def _count(number: int) -> str:
    return f"{number:,} prompt{'' if number == 1 else 's'}"


def _term(key: str, term: RewardTerm) -> str:
    notes = [term.name] if term.name not in (None, key) else []
    notes += [] if term.required else ["not required"]
    return f"{term.weight:g} × {key}" + (f" ({', '.join(map(str, notes))})" if notes else "")
