"""Functions that start a run's worker pools and load the models into them; run/job.py and run/recovery.py call them."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError, nccl_obstacle
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER, is_scoring_pool, served_terms
from async_flowrl.controller.admission import check_base, load_rollout
from async_flowrl.controller.replicas import MAX_GROUPS_PER_CALL
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.memory.devices import check_devices
from async_flowrl.memory.trainer_layout import resolved
from async_flowrl.observability.console import console_of
from async_flowrl.observability.terminal import named_lines, say
from async_flowrl.policies.registry import DTYPES
from async_flowrl.rewards.served import check_program
from async_flowrl.rollout.vllm_omni.engine_settings import check_installed
from async_flowrl.run.nodes import LABEL_CHARACTERS, look_at_nodes, quick_lane
from async_flowrl.run.pools import as_two, controller_placement, outline, pools
from async_flowrl.run.prepare import Prepared
from async_flowrl.tickets.arithmetic import SENT_VERSIONS, stored_bytes
from async_flowrl.types import Conditioning, EncoderInput
from checkpoint_engine.transports import AUTO, NCCL, OBJECT_STORE, PYNCCL, resolve_transport
from separation.cluster import check_results, cluster
from separation.group import Worker, WorkerFailed, WorkerGroup
from separation.processes import ctrl_c_ignored
from separation.rendezvous import join_process_group
from separation.resources import ResourcesMissing, check_fits, own_cluster, reserve
from separation.supervise import deadline, together

# Negative prompt → its embeddings, as the model family's network takes them.
Negatives = dict[EncoderInput, Conditioning]
TRANSPORT = "checkpoint_engine.transports:transport_here"  # What workers run to say which transport works there.
DEVICES = Path("/dev")  # Folder of device files: each GPU of NVIDIA has one, nvidia0, nvidia1, …


def check_machine(prepared: Prepared) -> None:
    """Raises ConfigError if the terminal cannot show the console, or this machine lacks what its workers need."""
    config, runtime = prepared.config, prepared.config.runtime
    console_of(config.console)
    for term, serve in served_terms(config) if runtime.on_this_machine else ():
        check_program(config, term, serve)
    if not runtime.own_cluster:
        return
    check_fits_here(config)
    if config.rollout.engine == "vllm_omni":
        try:
            check_installed()
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if config.checkpoint_engine.transport in (NCCL, PYNCCL):
        from separation.ray_internals import gpus_here

        try:
            resolve_transport(config.checkpoint_engine.transport, "cuda" if gpus_here() else "cpu")
        except ValueError as error:
            raise ConfigError(f"checkpoint_engine.transport: {error}") from error


def check_fits_here(config: Config) -> None:
    """Raises ConfigError, with a table, if this machine's cores or GPUs cannot hold the pools; starts nothing."""
    # Also for GPUs that Ray does not find, because the run would train on the CPU without a word.
    from separation.ray_internals import gpus_here

    specs = outline(config)
    unseen = sorted(DEVICES.glob("nvidia[0-9]*")) if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") else []
    if unseen and gpus_here() == 0 and any(spec.gpus_per_worker > 0 for spec in specs):
        raise ConfigError(
            f"Ray finds no GPU on this machine, but there is {unseen[0]}: Ray asks NVML, whose library "
            "(libnvidia-ml.so.1) it does not find; tell it with RAY_OVERRIDE_RESOURCES="
            f"'{{\"GPU\": {len(unseen)}}}', or train on the CPU with CUDA_VISIBLE_DEVICES="
        )
    try:
        cpus, custom = own_cluster(specs, os.cpu_count() or 1)
        here = {"CPU": float(cpus), "GPU": gpus_here(), **custom}
        check_fits(reserve(specs, here), [here])
    except ResourcesMissing as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def open_cluster(prepared: Prepared, logs: Path) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Starts the pools and yields pool name → pool; they end with the block. Raises as `cluster` does."""
    # While the pools end, Ctrl-C is ignored, because Ray would exit in the middle.
    config = prepared.config
    pooled = cluster(
        pools(prepared),
        backend=config.runtime.backend,
        address=config.runtime.address,
        start_deadline=config.deadlines.load,
        log_dir=logs,
        store_bytes=stored_bytes(prepared.at_largest, prepared.shapes),
    )
    with ExitStack() as last:
        async with pooled as groups:
            try:
                async with as_two(groups) as divided:
                    await look_at_nodes(config, divided, logs.parent)
                    yield divided
            finally:
                last.enter_context(ctrl_c_ignored())


def check_stored(prepared: Prepared, trained: int) -> None:
    """Raises StoreTooSmall if the cluster cannot store all that waits, now that `trained` parameters are known."""
    # `open_cluster` has counted the tickets alone. Weights on their way are added, and the state that is kept of the
    # trainer.
    config = prepared.config
    sent = SENT_VERSIONS * trained * DTYPES[prepared.model.dtype].itemsize
    check_results(config.runtime.backend, stored_bytes(prepared.at_largest, prepared.shapes, trained) + sent)


async def load_pools(config: Config, groups: Mapping[str, WorkerGroup], trainers: TrainerGroup) -> dict[str, Any]:
    """Loads the model in all trainer ranks and rollout workers at the same time; returns what trainer rank 0 reports.

    Raises StartError unless all hold the same base weights, and the errors of loading.
    """
    rollouts = groups[ROLLOUT].workers
    async with asyncio.TaskGroup() as tasks:
        digests = [tasks.create_task(load_rollout(worker, seconds=config.deadlines.load)) for worker in rollouts]
        if placement_of(config).together:
            await asyncio.wait(digests)  # The rollout worker may need the device for text encoders before it is in use.
        trainer = tasks.create_task(load_trainer(config, groups[TRAINER], trainers))
    info = trainer.result()
    for worker, digest in zip(rollouts, digests, strict=True):
        check_base(worker, digest.result(), info["base_digest"])
    return info


async def load_trainer(config: Config, group: WorkerGroup, trainers: TrainerGroup) -> dict[str, Any]:
    async with deadline(config.deadlines.load, "load: model of the trainer"):
        # A single rank needs a process group only if its base model is offloaded to the CPU.
        if len(group.workers) > 1 or config.trainer.cpu_offload:
            await join_process_group(
                group, timeout=controller_placement(config).update_seconds(MAX_GROUPS_PER_CALL + 2)
            )
        infos: list[dict[str, Any]] = await trainers.all("load", trainers.settings)
    kinds = Counter(info["device_kind"] for info in infos)
    if len(kinds) > 1:
        counted = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        logger.warning(
            "trainer ranks on devices of several kinds may round differently, so that the weights depend on which rank "
            "trains what: %s",
            counted,
        )
    trainers.laid_out(config, infos[0]["ranks_per_replica"])
    return infos[0]


async def encode_negatives(prepared: Prepared, worker: Worker) -> Negatives:
    """Has a rollout worker encode the negative prompts for the trainer, which has no text encoder; {} without CFG."""
    config = prepared.config
    if max(config.rollout.true_cfg_scale, config.algorithm.reference_cfg_scale or 0.0) <= 1:
        return {}
    default = config.rollout.negative_prompt
    # A negative prompt that is encoded with a prompt's images comes with the trajectories of that prompt.
    own = (prompt.negative_wording(default) for prompt in prepared.requests.train if not prompt.images)
    if not (texts := list(dict.fromkeys(own))):
        return {}
    encoded = await worker.call("engine.encode", texts)
    return dict(zip(texts, encoded, strict=True))


async def send_negatives(trainers: TrainerGroup, negatives: Negatives) -> None:
    if negatives:
        await trainers.all("update.set_negatives", negatives)


logger = logging.getLogger(__name__)


async def check_pools(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], trainers: TrainerGroup
) -> tuple[Prepared, dict[str, int], str]:
    """Makes the checks that need workers and no models; returns as `lay_out`, and the transport. ConfigError."""
    prepared, memory = await lay_out(prepared, groups, trainers)
    if memory:
        for sentence in await asyncio.to_thread(check_devices, prepared.config, memory):
            logger.warning("%s", sentence)
    return prepared, memory, await choose_transport(prepared.config, trainers.first, groups[ROLLOUT].workers)


async def choose_transport(config: Config, sender: Worker, rollouts: Sequence[Worker]) -> str:
    """Returns the run's transport; the trainer's rank `sender` resolves `auto`.

    Raises ConfigError, with the worker, for one that lacks what the transport or the engine needs.
    """
    # Workers are asked, because the controller itself may have neither a GPU nor a torch with CUDA.
    configured = config.checkpoint_engine.transport
    if configured == AUTO and nccl_obstacle(config):
        configured = OBJECT_STORE
    async with deadline(config.deadlines.load, "load: software of the workers"):
        if config.rollout.engine == "vllm_omni":
            what = f"{check_installed.__module__}:check_installed"
            await together(*(ask("rollout.engine", worker, what) for worker in rollouts))
        if configured == OBJECT_STORE:
            return OBJECT_STORE
        asked = [sender, *(rollouts if configured in (NCCL, PYNCCL) else ())]
        answers = await together(
            *(ask("checkpoint_engine.transport", worker, TRANSPORT, configured) for worker in asked)
        )
    return str(answers[0])


async def ask(key: str, worker: Worker, method: str, *args: str) -> Any:
    """Returns the worker's answer. ConfigError, which names the configuration key, for a ValueError."""
    try:
        return await worker.call(method, *args)
    except WorkerFailed as error:
        if error.kind != ValueError.__name__:
            raise
        raise ConfigError(f"{key}: {worker.name} on node {worker.node}: {error.message}") from error


async def lay_out(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], trainers: TrainerGroup
) -> tuple[Prepared, dict[str, int]]:
    """Decides what `auto` means in the trainer's layout; returns the run and pool → its smallest device's bytes."""
    config = prepared.config
    async with deadline(config.deadlines.load, "load: memory of the devices"):
        memory = await device_memory(config, groups)
    chosen, reason = await asyncio.to_thread(resolved, prepared.at_largest, memory)
    trainers.settings = chosen.trainer
    if reason:
        logger.info("%s", reason)
        if config.console != "quiet":
            say(named_lines([("layout", reason)], LABEL_CHARACTERS))
    return replace(prepared, config=replace(config, trainer=chosen.trainer)), memory


async def device_memory(config: Config, groups: Mapping[str, WorkerGroup]) -> dict[str, int]:
    # Rollout workers of vllm_omni are left out, because they start CUDA in processes of their own and plan their memory
    # themselves.
    memory: dict[str, int] = {}
    for pool, group in groups.items():
        planned = is_scoring_pool(pool) or pool == TRAINER or (pool == ROLLOUT and config.rollout.engine != "vllm_omni")
        if not planned or group.spec.gpus_per_worker == 0:
            continue
        lane = quick_lane(group.spec)
        calls = (worker.call("async_flowrl.observability.flops:total_memory", lane=lane) for worker in group.workers)
        if sizes := [size for size in await asyncio.gather(*calls) if size is not None]:
            memory[pool] = min(sizes)
    return memory
