"""Specs of a run's worker pools: the class of the workers, their lanes, threads and GPUs. Nothing is started here."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER, RewardPool, held_out_by_pool, scoring_pools
from async_flowrl.controller.deadlines import SeparatePools
from async_flowrl.controller.reward_servers import SERVERS, server_pools
from async_flowrl.run.nodes import OUR_CODE
from async_flowrl.shared.controller import SharedPool
from async_flowrl.tickets.request import upcoming
from separation.cohosted import SubPools, sub_groups
from separation.group import PoolSpec, WorkerGroup

if TYPE_CHECKING:
    from async_flowrl.run.prepare import Prepared

# Environment that makes torch ask the driver whether there is a GPU, without initialising CUDA. Processes that
# vllm_omni starts must not inherit an initialised CUDA.
NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# Limit on the prompts that a rollout worker with `text_encoder=cached` is told in advance. For any other prompt, it
# loads the text encoder again.
MAX_UPCOMING = 32_768


def pools(prepared: "Prepared") -> list[PoolSpec]:
    config = prepared.config
    model: dict[str, Any] = {"config": config, "model": prepared.model}
    # Rollout workers that keep no text encoder loaded are told the prompts to come.
    cached = config.rollout.text_encoder == "cached"
    ahead = {"upcoming": upcoming(prepared.requests, MAX_UPCOMING)} if cached else {}
    arguments = {
        SHARED: {**model, "sizes": prepared.trained_sizes, **ahead},
        TRAINER: {**model, "sizes": prepared.trained_sizes},
        ROLLOUT: {**model, **ahead},
    }
    specs = []
    for spec in outline(config):
        factory, more = prepared.workers.get(spec.factory, (spec.factory, {}))
        specs.append(
            replace(spec, factory=factory, arguments={**spec.arguments, **arguments.get(spec.name, {}), **more})
        )
    return specs


def outline(config: Config) -> list[PoolSpec]:
    """Returns `pools` without what only a prepared run knows: the arguments of trainer ranks and rollout workers."""
    training = [shared_pool(config)] if config.placement == SHARED else separate_pools(config)
    return [*training, *(reward_spec(pool, config) for pool in scoring_pools(config)), *server_pools(config)]


def controller_placement(config: Config) -> SeparatePools:
    return (SharedPool if config.placement == SHARED else SeparatePools)(config)


def shared_pool(config: Config) -> PoolSpec:
    """Returns the pool for `placement=shared`: its processes sample and train (see `SUB_POOLS`)."""
    return PoolSpec(
        SHARED,
        "async_flowrl.shared.shared_worker:SharedWorker",
        config.trainer.num_workers,
        gpus_per_worker=config.trainer.gpus_per_worker,
        threads=config.trainer.threads,
        lanes=("train", "publish", "keep", "save", "sync", "control"),
        process_group=True,
        workers_per_node=config.trainer.workers_per_node,
        same_code=OUR_CODE,
        environment={**config.rollout.environment, **config.trainer.environment},
        expandable_segments=True,
    )


# The two pools that share the processes of `shared_pool`, each with a map from its lanes to those of the process.
# Calls to train have a lane of their own, so that they do not wait behind tickets; shared/turns.py decides which of the
# two computes.
SUB_POOLS: SubPools = {
    TRAINER: {"main": "train", **{lane: lane for lane in ("publish", "keep", "save", "control")}},
    ROLLOUT: {"main": "main", "sync": "sync", "control": "control"},
}


def separate_pools(config: Config) -> list[PoolSpec]:
    vllm_omni = config.rollout.engine == "vllm_omni"
    return [
        PoolSpec(
            TRAINER,
            "async_flowrl.training.trainer_worker:TrainerWorker",
            config.trainer.num_workers,
            gpus_per_worker=config.trainer.gpus_per_worker,
            threads=config.trainer.threads,
            lanes=("publish", "keep", "save", "control"),
            process_group=True,
            workers_per_node=config.trainer.workers_per_node,
            same_code=OUR_CODE,
            environment=config.trainer.environment,
            expandable_segments=True,
        ),
        PoolSpec(
            ROLLOUT,
            "async_flowrl.rollout.rollout_worker:RolloutWorker",
            config.rollout.num_workers,
            gpus_per_worker=config.rollout.gpus_per_worker,
            threads=config.rollout.threads,
            lanes=("sync", "control"),
            workers_per_node=config.rollout.workers_per_node,
            min_workers=config.rollout.min_workers,
            max_workers=config.rollout.max_workers,
            same_code=OUR_CODE,
            environment=(NVML_CHECK if vllm_omni else {}) | config.rollout.environment,
            expandable_segments=not vllm_omni,  # whose all-reduce cannot share such memory
        ),
    ]


def reward_spec(pool: RewardPool, config: Config) -> PoolSpec:
    return PoolSpec(
        pool.name,
        "async_flowrl.rewards.reward_worker:RewardWorker",
        pool.workers,
        arguments={
            "config": pool.config(config.reward),
            "folder": Path(config.output_dir).absolute(),
            SERVERS: {},
            "held_out": held_out_by_pool(config).get(pool.name, {}),
        },
        gpus_per_worker=pool.gpus_per_worker,
        threads=pool.threads,
        same_code=OUR_CODE,
        environment=config.reward.environment,
    )


@asynccontextmanager
async def as_two(groups: Mapping[str, WorkerGroup]) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Yields the pools by name; a shared pool, if there is one, is replaced by a trainer and a rollout pool."""
    if SHARED not in groups:
        yield groups
        return
    others = {name: group for name, group in groups.items() if name != SHARED}
    async with sub_groups(groups[SHARED], SUB_POOLS) as two:
        yield {**two, **others}
