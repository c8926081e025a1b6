"""The servers of rewards that have some, beside an evaluation: as in a run, in pools of this process, one per term."""

import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from async_flowrl.config.schema import Config, HeldOutConfig, RewardTerm, ServeConfig
from async_flowrl.controller.context import NoServers, Servers
from async_flowrl.controller.reward_servers import server_pools, serving
from async_flowrl.evaluate.job import Job
from async_flowrl.rewards.composite import CompositeReward
from async_flowrl.rewards.served import Addresses, Connecting, served_terms
from separation.cluster import cluster
from separation.group import VISIBLE_DEVICES

logger = logging.getLogger(__name__)


class Quiet:
    """An observer that keeps nothing: what matters is in the log."""

    def now(self) -> float:
        return 0.0

    def event(self, event: str, **fields: Any) -> None:
        """Not kept."""

    def state(self, worker: str, state: str) -> None:
        """Not kept."""


@asynccontextmanager
async def servers_of(job: Job, reward: CompositeReward, device: str) -> AsyncIterator[Servers]:
    """Starts them, says to the reward where they are, and stops them, whatever ends the body.

    Raises ServerLost for one that does not come up, or dies too often; what they wrote is then kept, and named.
    """
    if not any(term.serve for term in job.terms.values()):
        yield NoServers()
        return
    folder = Path(tempfile.mkdtemp(prefix="async-flowrl-evaluate-"))
    config = _config(job, folder, device)
    threads = torch.get_num_threads()  # local workers set this process's
    pools = [replace(pool, threads=threads) for pool in server_pools(config)]

    def told(addresses: Mapping[str, Addresses]) -> None:
        for term in reward.terms:
            if (found := addresses.get(term.name)) is not None:
                cast("Connecting", term.reward).connect(found.urls, found.token)

    for name, _ in served_terms(config):
        logger.info("starting the server of the reward %s, its output is in %s", name, folder)
    async with cluster(pools, backend="local") as groups, serving(config, groups, listeners=[told]) as servers:
        await servers.all_up(Quiet(), [])
        yield servers
    shutil.rmtree(folder)


def _config(job: Job, folder: Path, device: str) -> Config:
    """The job's terms with one server each, as the terms of a run in `folder` on this machine."""
    free = _visible(torch.cuda.device_count())[1:] if device != "cpu" else None
    terms = {name: term if term.serve is None else _single(name, term, free) for name, term in job.terms.items()}
    config = job.config
    return replace(
        config,
        output_dir=str(folder),
        reward=replace(config.reward, terms=terms),
        evaluate=replace(config.evaluate, reward=HeldOutConfig()),
        runtime=replace(config.runtime, backend="local", address=None),
    )


def _visible(count: int) -> list[str]:
    """What the devices of this process are called in CUDA_VISIBLE_DEVICES: it may itself have been shown but some."""
    shown = os.environ.get(VISIBLE_DEVICES)
    return [name.strip() for name in shown.split(",")][:count] if shown else [str(index) for index in range(count)]


def _single(name: str, term: RewardTerm, free: list[str] | None) -> RewardTerm:
    """With one server, on GPUs that are taken from `free`: the first one makes the images.

    Raises ValueError where there are too few.
    """
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
    own, free[:count] = free[:count], []
    seen: ServeConfig = replace(serve, replicas=1, environment={**serve.environment, VISIBLE_DEVICES: ",".join(own)})
    return replace(term, serve=seen)
