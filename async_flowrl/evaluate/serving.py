"""Reward servers of an evaluation: terms with `serve` get one server each, started in this process's own pools."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import torch

from async_flowrl.config.pools import served_terms
from async_flowrl.config.schema import Config, HeldOutConfig, RewardTerm, ServeConfig
from async_flowrl.controller.context import NoServers, Servers
from async_flowrl.controller.reward_servers import server_pools, serving
from async_flowrl.evaluate.job import Job
from async_flowrl.observability.events import EventLog
from async_flowrl.rewards.composite import CompositeReward, connect
from async_flowrl.rewards.served import Addresses
from separation.cluster import cluster
from separation.group import VISIBLE_DEVICES

logger = logging.getLogger(__name__)


@asynccontextmanager
async def servers_of(job: Job, reward: CompositeReward, device: str) -> AsyncIterator[Servers]:
    """Context that starts the job's reward servers, tells the rewards their addresses, and finally stops the servers.

    Without served terms it yields `NoServers` and starts nothing. Raises ServerLost if a server does not start or dies
    too often; the folder with the servers' output, which the log names, is then kept.
    """
    if not any(term.serve for term in job.terms.values()):
        yield NoServers()
        return
    folder = Path(tempfile.mkdtemp(prefix="async-flowrl-evaluate-"))
    config = _config(job, folder, device)
    threads = torch.get_num_threads()  # a local worker sets the thread count of this process: keep it
    pools = [replace(pool, threads=threads) for pool in server_pools(config)]

    def told(addresses: Mapping[str, Addresses]) -> None:
        connect(reward.terms, addresses)

    for name, _ in served_terms(config):
        logger.info("starting the server of the reward %s, its output is in %s", name, folder)
    with closing(EventLog(folder / "events.jsonl", time.time)) as events:
        async with cluster(pools, backend="local") as groups, serving(config, groups, listeners=[told]) as servers:
            await servers.all_up(events, [])
            yield servers
    shutil.rmtree(folder)


def _config(job: Job, folder: Path, device: str) -> Config:
    """Returns a configuration with one server per served term, for a local run in `folder`."""
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
    """Returns the names of this process's GPUs as in CUDA_VISIBLE_DEVICES, which may already hide some of them."""
    shown = os.environ.get(VISIBLE_DEVICES)
    return [name.strip() for name in shown.split(",")][:count] if shown else [str(index) for index in range(count)]


def _single(name: str, term: RewardTerm, free: list[str] | None) -> RewardTerm:
    """Returns the term with one server, on GPUs taken from `free`, which lacks the GPU that makes the images.

    Raises ValueError if there are too few GPUs.
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
