"""Description of one evaluation: weights, prompts, rewards and noises, from a run or the command line."""

import logging
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from async_flowrl.cli.generate import config_of
from async_flowrl.config.check import guidance_refusal
from async_flowrl.config.compose import read_config
from async_flowrl.config.own_code import absolute
from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import Resolution, configured, frames_of, resolution_option, with_frames
from async_flowrl.config.schema import Config, DataConfig, HeldOutConfig, RewardTerm
from async_flowrl.config.scoring_pools import served_terms
from async_flowrl.controller.reward_servers import RewardServers, server_pools, serving
from async_flowrl.data.load import load_data
from async_flowrl.data.store import Prompts
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.policies.registry import PromptCheck, load_family, resolve_model
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rewards.composite import CompositeReward
from async_flowrl.rewards.registry import check_rewards, prompt_check
from async_flowrl.rewards.served import check_program
from async_flowrl.tickets.request import evaluation_resolution
from async_flowrl.types import Prompt
from separation.cluster import cluster
from separation.group import VISIBLE_DEVICES

logger = logging.getLogger(__name__)

# Origin of a score: option `--reward`, or a run's trained or held-out terms (held out: measured, not trained on).
ASKED, TRAINED, HELD_OUT = "asked", "trained", "held_out"


TOTAL = "reward"  # Name of the weighted sum of a run's trained terms.


@dataclass(frozen=True)
class Job:
    """An evaluation to make. A term is one reward with its weight and options; each term is a score of its own."""

    # `kinds` gives the origin of each term (ASKED, TRAINED or HELD_OUT), `config` the sampling and the terms.

    config: Config
    trained_weights: Path  # A LoRA, or a transformer's folder.
    kinds: Mapping[str, str]
    prompts: Sequence[Prompt]
    where: Callable[[int], str]  # Returns the file and line of a prompt.
    chosen: str  # Description of the prompts in words, for the table.
    seeds: tuple[int, ...]  # Seeds of the initial noises; each gives `evaluate.images_per_prompt` images per prompt.
    one_size: bool = False  # True if every image has `rollout.resolution`, even if its prompt has a size of its own.

    def resolution(self, place: int) -> Resolution:
        size = None if self.one_size else self.prompts[place].resolution
        if size is None:
            return evaluation_resolution(self.config, place)
        return with_frames(size, self.config.rollout.frames)

    @property
    def terms(self) -> Mapping[str, RewardTerm]:
        return self.config.reward.terms

    @property
    def images_per_prompt(self) -> int:
        return len(self.seeds) * self.config.evaluate.images_per_prompt

    @property
    def trained(self) -> dict[str, float]:
        """Weights of the trained terms, whose weighted sum is the score `reward`; those of weight 0 are left out."""
        return {
            name: weight for name, kind in self.kinds.items() if kind == TRAINED and (weight := self.terms[name].weight)
        }


def job_of(options: Namespace) -> Job:
    config, trained = _origin(options)
    _sampling(config, options)
    terms = {name: (term, TRAINED) for name, term in config.reward.terms.items()}
    terms |= {name: (term, HELD_OUT) for name, term in config.evaluate.reward.terms.items()}
    if options.reward:
        terms = _named_terms(options.reward, {name: term for name, (term, _) in terms.items()})
    elif not terms:
        raise ValueError("--reward is needed: the weights are not of a run, whose rewards could be taken")
    whole = replace(config.reward, terms={name: term for name, (term, _) in terms.items()})
    available, chosen = _prompts(config, options, needs_target=check_rewards(whole))
    for name, term in whole.terms.items():
        if term.serve is not None:
            check_program(config, name, term.serve)
    seed, most = config.evaluate.seed, config.evaluate.max_prompts
    job = Job(
        config=replace(config, reward=whole),
        trained_weights=trained,
        kinds={name: kind for name, (_, kind) in terms.items()},
        prompts=available[:most],
        where=available.where,
        chosen=chosen,
        seeds=tuple(range(seed, seed + (options.seeds or 1))),
        one_size=options.resolution is not None,
    )
    available.check_each(PromptCheck(resolve_model(config.model), targets=False), most)
    if (check := prompt_check(whole)) is not None:
        available.check_each(lambda prompt: check(replace(prompt, resolution=job.resolution(prompt.index))), most)
    return job


def _origin(options: Namespace) -> tuple[Config, Path]:
    # `data.train` is empty if there is no run.
    source: Path = options.source.expanduser()
    ran = read_config(source / "config.yaml") if (source / "config.yaml").is_file() else None
    trained: Path = source if ran is None else RunDirectory(source).trained(ran.tune)
    if options.lora is not None:
        trained = options.lora.expanduser()
    elif ran is not None and not trained.is_dir():
        raise ValueError(
            f"{source} holds no {trained.name}/: the run has not ended; export its newest checkpoint "
            f"(async-flowrl export {source} OUT) and give --lora OUT{'/transformer' if tuning_of(ran).whole else ''}"
        )
    run = source if ran is not None else None
    return config_of(trained, options.base, run=run, option="--base"), trained


def _sampling(config: Config, options: Namespace) -> None:
    evaluate, rollout = config.evaluate, config.rollout
    evaluate.seed = evaluate.seed if options.seed is None else options.seed
    evaluate.images_per_prompt = options.images or evaluate.images_per_prompt
    evaluate.num_inference_steps = options.num_inference_steps or evaluate.num_inference_steps
    evaluate.max_prompts = options.max_prompts or evaluate.max_prompts
    if options.resolution is not None:
        # A size without frames has the run's.
        size = with_frames(resolution_option(options.resolution), frames_of(configured(rollout)[0]))
        rollout.resolution, rollout.resolutions, rollout.frames = size, [], frames_of(size)
    if options.guidance is not None:
        embedded = load_family(resolve_model(config.model).family).usual_guidance[1] > 0
        if refusal := guidance_refusal("--guidance", options.guidance, embedded=embedded):
            raise ValueError(refusal)
        if embedded:
            rollout.guidance_scale = options.guidance
        else:
            rollout.true_cfg_scale = options.guidance


def _named_terms(names: Sequence[str], run_terms: Mapping[str, RewardTerm]) -> dict[str, tuple[RewardTerm, str]]:
    terms: dict[str, tuple[RewardTerm, str]] = {}
    for name in names:
        key = name.rpartition(":")[2]
        if key in terms or key == TOTAL:
            raise ValueError(f"--reward {name}: there is another score of the name {key!r}")
        terms[key] = (run_terms.get(name, RewardTerm(name=absolute(name))), ASKED)
    return terms


def _prompts(config: Config, options: Namespace, *, needs_target: bool) -> tuple[Prompts, str]:
    if options.prompts is not None:
        config.evaluate.max_prompts = options.max_prompts or sys.maxsize
        file = str(find_data(str(options.prompts), key="--prompts", folder=True))
        alone = DataConfig(train=file, prompt_key=config.data.prompt_key, held_out=0, images=config.data.images)
        return load_data(alone, needs_target=needs_target).train, f"of {file}"
    if not config.data.train:
        raise ValueError("--prompts is needed: the weights are not of a run, whose prompts could be taken")
    data = load_data(config.data, needs_target=needs_target)
    return data.evaluation, data.chosen


@asynccontextmanager
async def servers_of(job: Job, reward: CompositeReward, device: str) -> AsyncIterator[RewardServers]:
    """Starts the job's reward servers, tells the rewards their addresses, and finally stops them.

    Raises ServerLost if one does not start or dies too often; the folder with their output is then kept.
    """
    if not any(term.serve for term in job.terms.values()):
        yield RewardServers()
        return
    folder = Path(tempfile.mkdtemp(prefix="async-flowrl-evaluate-"))
    config = _config(job, folder, device)
    threads = torch.get_num_threads()  # a local worker sets the thread count of this process: keep it
    pools = [replace(pool, threads=threads) for pool in server_pools(config)]

    for name, _ in served_terms(config):
        logger.info("starting the server of the reward %s, its output is in %s", name, folder)
    with closing(EventLog(folder / "events.jsonl", time.time)) as events:
        async with (
            cluster(pools, backend="local") as groups,
            serving(config, groups, listeners=[reward.connect]) as servers,
        ):
            await servers.all_up(events, [])
            yield servers
    shutil.rmtree(folder)


def _config(job: Job, folder: Path, device: str) -> Config:
    # The names of this process's GPUs as in CUDA_VISIBLE_DEVICES, which may already hide some of them.
    count, shown = torch.cuda.device_count(), os.environ.get(VISIBLE_DEVICES)
    names = [name.strip() for name in shown.split(",")] if shown else list(map(str, range(count)))
    free = names[1:count] if device != "cpu" else None
    terms = {name: term if term.serve is None else _single(name, term, free) for name, term in job.terms.items()}
    config = job.config
    return replace(
        config,
        output_dir=str(folder),
        reward=replace(config.reward, terms=terms),
        evaluate=replace(config.evaluate, reward=HeldOutConfig()),
        runtime=replace(config.runtime, backend="local", address=None),
    )


def _single(name: str, term: RewardTerm, free: list[str] | None) -> RewardTerm:
    # ValueError if too few.
    serve = term.serve
    assert serve is not None
    if free is None or serve.gpus == 0:
        return replace(term, serve=replace(serve, replicas=1))
    count = max(1, int(serve.gpus))
    if count > len(free):
        raise ValueError(
            f"the server of {name} wants {serve.gpus:g} GPUs beside the one that makes the images, and {len(free)} are "
            f"left; let it share that one with serve.gpus=0 in RUN/config.yaml, or name other rewards with --reward"
        )
    names, free[:count] = free[:count], []
    environment = {**serve.environment, VISIBLE_DEVICES: ",".join(names)}
    return replace(term, serve=replace(serve, replicas=1, environment=environment))
