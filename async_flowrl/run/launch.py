"""Launch: loaded worker pools, whose base weights agree, from a checked configuration."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.reward_pools import RewardPool, reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.controller.admission import check_base, load_rollout
from async_flowrl.controller.build import ROLLOUT, TRAINER
from async_flowrl.controller.download import download_model, loaders, model_of
from async_flowrl.controller.living import group_timeout
from async_flowrl.controller.reward_servers import SERVERS, server_pools
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.observability.console import console_of, show_what_can_be_shown
from async_flowrl.run.nodes import OUR_CODE, look_at_nodes
from async_flowrl.run.prepare import Prepared, doubts_of
from async_flowrl.run.transport import refusal
from async_flowrl.tickets.arithmetic import shape, stored_bytes
from async_flowrl.tickets.wordings import upcoming
from async_flowrl.types import Conditioning, Wording
from checkpoint_engine.transports import NCCL, PYNCCL, resolve_transport
from separation.cluster import cluster
from separation.group import PoolSpec, Worker, WorkerGroup
from separation.node_checks import OtherCode
from separation.placement import ResourcesMissing, check_fits, own_cluster, reserve
from separation.rendezvous import join_process_group
from separation.supervise import deadline
from separation.table import format_table

EXPANDABLE = "expandable_segments:True"
"""torch's allocator then grows its segments, which leaves no gaps between blocks of many sizes (FSDP2's shards, prompts
of any length). Not for vllm_omni: its all-reduce between the GPUs of a worker cannot share such memory."""
NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU, torch then asks the driver instead of starting CUDA, which vllm_omni's processes must not
inherit started."""

MAX_UPCOMING = 32_768
"""Prompts that a worker without text encoder is told of ahead; of more than these each one loads the encoder."""

Negatives = dict[Wording, Conditioning]
"""Negative prompt → what the model family needs of it."""


def pools(prepared: Prepared) -> list[PoolSpec]:
    """Trainer first: it is reserved first."""
    config, shared = prepared.config, {"config": prepared.config, "model": prepared.model}
    vllm_omni = config.rollout.engine == "vllm_omni"
    return [
        PoolSpec(
            TRAINER,
            "async_flowrl.training.worker:TrainerWorker",
            config.trainer.num_workers,
            arguments={**shared, "sizes": prepared.trained_sizes},
            gpus_per_worker=config.trainer.gpus_per_worker,
            threads=config.trainer.threads,
            lanes=("publish", "save", "control"),
            gang=True,
            workers_per_node=config.trainer.workers_per_node,
            same_code=OUR_CODE,
            environment=config.trainer.environment,
            allocator=EXPANDABLE,
        ),
        PoolSpec(
            ROLLOUT,
            "async_flowrl.rollout.worker:RolloutWorker",
            config.rollout.num_workers,
            arguments=shared | told_ahead(prepared),
            gpus_per_worker=config.rollout.gpus_per_worker,
            threads=config.rollout.threads,
            lanes=("sync", "control"),
            workers_per_node=config.rollout.workers_per_node,
            min_workers=config.rollout.min_workers,
            max_workers=config.rollout.max_workers,
            same_code=OUR_CODE,
            environment=(NVML_CHECK if vllm_omni else {}) | config.rollout.environment,
            allocator="" if vllm_omni else EXPANDABLE,
        ),
        *(reward_spec(pool, config) for pool in reward_pools(config.reward)),
        *server_pools(config),
    ]


def told_ahead(prepared: Prepared) -> dict[str, Any]:
    """What a rollout worker that keeps no text encoder is told of the prompts to come."""
    if prepared.config.rollout.text_encoder != "cached":
        return {}
    return {"upcoming": upcoming(prepared.requests, MAX_UPCOMING)}


def reward_spec(pool: RewardPool, config: Config) -> PoolSpec:
    """A pool of workers that score by some of the terms; those of the first pool score evaluations by held-out ones."""
    first = pool.name == reward_pools(config.reward)[0].name
    held_out = {"held_out": config.evaluate.reward.terms} if first else {}
    return PoolSpec(
        pool.name,
        "async_flowrl.rewards.worker:RewardWorker",
        pool.workers,
        arguments={
            "config": pool.config(config.reward),
            "delays": config.debug.delays,
            "seed": config.seed,
            "folder": Path(config.output_dir).absolute(),
            SERVERS: {},
            **held_out,
        },
        gpus_per_worker=pool.gpus_per_worker,
        threads=pool.threads,
        same_code=OUR_CODE,
        environment=config.reward.environment,
    )


def describe_run(prepared: Prepared) -> str:
    """Pools, tickets and bytes per step."""
    config = prepared.config
    plan = shape(config)
    images = config.prompts_per_step * config.group_size
    terms = {pool.name: f" ({', '.join(pool.terms)})" for pool in reward_pools(config.reward)}
    rows = [
        (
            spec.name,
            spec.size,
            f"{spec.gpus_per_worker:g}",
            spec.threads,
            spec.factory.rpartition(":")[2] + terms.get(spec.name, ""),
        )
        for spec in pools(prepared)
    ]
    lines = [
        f"{config.mode_name}: max_staleness {config.max_staleness}, {config.hand_over} hand-over, "
        f"{config.placement} pools",
        f"model {prepared.model.path} ({prepared.model.family}), algorithm {prepared.algorithm.name}",
        f"{config.total_steps} steps of {images} images: {plan.tickets_per_step} tickets of {config.images_per_ticket}",
        f"images of {prepared.sizes_in_words}",
        f"at most {stored_bytes(prepared.at_largest, prepared.shapes) / 1e6:.1f} MB of payload in the object store",
        *(f"WARNING: {sentence}" for sentence in doubts_of(prepared)),
        format_table(("pool", "workers", "GPUs each", "threads", "hosts"), rows),
    ]
    return "\n".join(lines) + "\n"


def check_machine(prepared: Prepared) -> None:
    """Raises ConfigError where a cluster of our own on this machine could not hold the pools or use the transport, or
    where the console cannot be what is asked.

    Of other clusters nothing is known here: they answer when the pools start.
    """
    config, runtime = prepared.config, prepared.config.runtime
    show_what_can_be_shown()
    console_of(config.console)
    if runtime.address is not None:
        return
    if runtime.backend != "ray":
        return
    try:
        fits_own_cluster(pools(prepared), config.placement)
    except ResourcesMissing as error:
        raise ConfigError(str(error)) from error
    if config.checkpoint_engine.transport in (NCCL, PYNCCL):
        from separation.ray_session import gpus_here

        try:
            resolve_transport(config.checkpoint_engine.transport, "cuda" if gpus_here() else "cpu")
        except ValueError as error:
            raise refusal(str(error)) from error


def fits_own_cluster(wanted: Sequence[PoolSpec], placement: str) -> None:
    """Raises ResourcesMissing where this machine's cores or GPUs cannot hold the pools. Nothing is started."""
    from separation.ray_session import gpus_here

    cpus, custom = own_cluster(wanted, os.cpu_count() or 1)
    here = {"CPU": float(cpus), "GPU": gpus_here(), **custom}
    check_fits(reserve(wanted, here, placement=placement, colocated=(ROLLOUT, TRAINER)), [here])


@asynccontextmanager
async def open_cluster(prepared: Prepared, logs: Path) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """The pools, which end when it is left; a second Ctrl-C does not come in between: Ray would exit in the middle."""
    config = prepared.config
    pooled = cluster(
        pools(prepared),
        backend=config.runtime.backend,
        address=config.runtime.address,
        placement=config.placement,
        start_deadline=config.deadlines.load,
        log_dir=logs,
        store_bytes=stored_bytes(prepared.at_largest, prepared.shapes),
    )
    with ExitStack() as last:
        async with refusals(), pooled as groups:
            try:
                await look_at_nodes(config, groups, logs.parent)
                yield groups
            finally:
                last.enter_context(ctrl_c_ignored())


@asynccontextmanager
async def refusals() -> AsyncIterator[None]:
    """Another version of this package on a node is nothing that a run could go on from."""
    try:
        yield
    except OtherCode as error:
        raise ConfigError(str(error)) from error


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


async def load_pools(config: Config, groups: Mapping[str, WorkerGroup], trainers: TrainerGroup) -> dict[str, Any]:
    """Loads the models everywhere at once, when their files are there.

    Raises StartError unless trainer and rollouts hold the same base weights.
    """
    rollouts = groups[ROLLOUT].workers
    everyone = loaders(rollouts, groups[TRAINER].workers)
    await download_model(model_of(groups[ROLLOUT]), everyone, seconds=config.deadlines.download)
    async with asyncio.TaskGroup() as tasks:
        trainer = tasks.create_task(load_trainer(config, groups[TRAINER], trainers))
        digests = [tasks.create_task(load_rollout(worker, seconds=config.deadlines.load)) for worker in rollouts]
    info = trainer.result()
    for worker, digest in zip(rollouts, digests, strict=True):
        check_base(worker, digest.result(), info["base_digest"])
    return info


async def load_trainer(config: Config, group: WorkerGroup, trainers: TrainerGroup) -> dict[str, Any]:
    async with deadline(config.deadlines.load, "load: model of the trainer"):
        # A single rank needs a process group only to offload its base.
        if len(group.workers) > 1 or config.trainer.cpu_offload:
            await join_process_group(group, timeout=group_timeout(config))
        infos: list[dict[str, Any]] = await trainers.all("load", 1, trainers.layout)
    trainers.laid_out(config, infos[0]["ranks_per_replica"])
    return infos[0]


async def encode_negatives(prepared: Prepared, worker: Worker) -> Negatives:
    """The trainer has no text encoder: a rollout worker encodes every negative prompt, once for all attempts."""
    config = prepared.config
    if config.rollout.true_cfg_scale <= 1:
        return {}
    default = config.rollout.negative_prompt
    texts: Sequence[Wording] = list(dict.fromkeys(p.negative_wording(default) for p in prepared.requests.train))
    encoded = await worker.call("engine.encode", texts)
    return dict(zip(texts, encoded, strict=True))


async def send_negatives(trainers: TrainerGroup, negatives: Negatives) -> None:
    """Brings every trainer rank the encoded negative prompts, where guidance needs them."""
    if negatives:
        await trainers.all("update.set_negatives", negatives)
