"""Rehearsal of a trainer rank: its real code on fake tensors, with loading, one update, and staging of a version.

The measurement of an optimizer step's KL is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import DTensor

from async_flowrl.algorithms.base import keeps_proximal
from async_flowrl.algorithms.window import draw_window
from async_flowrl.config.schema import Config
from async_flowrl.memory.model_sizes import Sizes, stored_sizes
from async_flowrl.memory.rehearsal.model import FakeModel, conditioning
from async_flowrl.memory.rehearsal.phases import Ledger, Phase
from async_flowrl.memory.rehearsal.process import rehearsed_process
from async_flowrl.policies.pipeline import Shapes
from async_flowrl.policies.quantized_layer import QuantizedLinear
from async_flowrl.policies.stored import StoredElements
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.tickets.request import sampling
from async_flowrl.training.forward_passes import UpdateMetrics
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest
from async_flowrl.training.parts import cut
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.types import Prompt, Trajectory

NEGATIVE = "negative"


@dataclass(frozen=True)
class RankRehearsal:
    # Name → phase: load, settle, behaviour, reference, forward, backward, optimizer, delivery, update (the rest).
    phases: dict[str, Phase]
    sizes: Sizes
    shapes: Shapes  # Shapes of a ticket's arrays.
    layout: str  # How the ranks hold the base weights, in words.
    rows: int  # Rows (one image at one denoising step each) of a forward pass.
    micro_batches: int  # Forward and backward passes of a rank per training step.
    frozen_passes: int  # Forward passes without gradient of a rank per training step.
    optimizer_steps: int  # Optimizer steps per training step.
    host_bytes: int  # Of an offloaded base, before torch rounds what it pins; 0 without `trainer.cpu_offload`.
    version_bytes: int
    # Bytes of a version that this rank has: all of them, or those of its rows if the ranks share the weights.
    share_bytes: int
    # Bytes of the weights that are not trained; a process that samples, too, has them once (`placement=shared`).
    frozen_bytes: int


def rehearse_trainer(config: Config, model: FakeModel) -> RankRehearsal:
    """Rehearses rank 0 of the configuration's ranks in steady state, with optimizer state and all versions."""
    config = replace(config, algorithm=replace(config.algorithm, kl_probe_images=0, max_kl_per_update=None))
    world = config.trainer.num_workers
    joined = world > 1 or config.trainer.cpu_offload
    ledger = Ledger(world)
    with rehearsed_process(model, ledger, joined=joined):
        worker = TrainerWorker(config, model.resolved, 0, "trainer-0")
        with ledger.phase("load"):
            info = worker.load()
        shards = [each for each in worker.policy.transformer.parameters() if isinstance(each, DTensor)]
        # FSDP2 keeps an offloaded base in host memory.
        host = sum(each.to_local().nbytes for each in shards) if config.trainer.cpu_offload else 0
        ledger.moved(-host)
        ledger.phases["load"].peak -= host
        with ledger.phase("settle"):
            settle(worker, config)
            if world > 1:  # The sum over all ranks has memory of its own from the end of the first step on.
                update(worker, config)
        with ledger.phase("update"), mock.patch.object(UpdateMetrics, "span", _spans(ledger)):
            request = update(worker, config)
        with ledger.phase("delivery"):
            worker.sender.stage(worker.versions.newest)
        version_bytes = worker.sender.policy.layout.nbytes
        samples = len(request.metas[0].parts[0])
        rows = samples * _columns(config)
        return RankRehearsal(
            phases=ledger.phases,
            sizes=sizes_of(worker, model),
            shapes=cast("Any", worker.policy).shapes(config.rollout.resolution),
            layout=str(info["layout"]),
            rows=rows,
            **_counts(worker, config),
            host_bytes=host,
            version_bytes=version_bytes,
            share_bytes=version_bytes // (world if worker.world.by_group else 1),
            frozen_bytes=sum(each.nbytes for each in worker.policy.transformer.parameters() if not each.requires_grad),
        )


def sizes_of(worker: TrainerWorker, model: FakeModel) -> Sizes:
    network, config = worker.policy.transformer, worker.config
    trained = tuning_of(config).parameters(network).values()
    lora = set() if tuning_of(config).whole else set(trained)
    base = {name: each for name, each in network.named_parameters() if each not in lora}
    elements = {name: each.numel() for name, each in base.items()}
    for name, layer in network.named_modules():
        if isinstance(layer, QuantizedLinear):
            elements[f"{name}.weight"] = layer.in_features * layer.out_features
            del elements[f"{name}.scale"]
    stored = StoredElements(elements, model.known.text_parameters, 0)
    return replace(
        stored_sizes(config, stored, model.dtype.itemsize),
        base_bytes=sum(each.nbytes for each in base.values()),
        adapter_parameters=sum(each.numel() for each in trained),
        buffer_bytes=sum(buffer.nbytes for buffer in network.buffers()),
    )


def _columns(config: Config) -> int:
    return config.trainer.timesteps_per_forward or trained_steps(config)


def _spans(ledger: Ledger) -> Any:
    own = UpdateMetrics.span

    @contextmanager
    def span(metrics: UpdateMetrics, name: str) -> Iterator[None]:
        with ledger.phase(name), own(metrics, name):
            yield

    return span


def settle(worker: TrainerWorker, config: Config) -> None:
    """Brings the worker to steady state: steps without groups fill its retained versions, one Adam step its moments."""
    last = StepPlan(rows=1, update=config.trainer.updates_per_batch - 1)
    for step in range(config.live_versions):
        end_step(worker, TrainRequest(step, (), last))
    # On CUDA the optimizer's kernel is fused and has no temporary tensors.
    for group in worker.optimizer._adam.param_groups:
        group["fused"], group["foreach"] = True, False
    worker.snapshots.wait()  # What it copies must not change.
    worker.optimizer.step(0.0, dict.fromkeys(worker.optimizer.gradient_norms(), 1.0))


def update(worker: TrainerWorker, config: Config) -> TrainRequest:
    request, trajectory = update_request(worker, config)
    cast("Any", worker.update).set_negatives({NEGATIVE: trajectory.conditioning})
    worker.train(request, trajectory)
    end_step(worker, TrainRequest(request.step, ()))
    return request


def end_step(worker: TrainerWorker, request: TrainRequest) -> None:
    worker.add_up(request)
    worker.take_step()


def update_request(worker: TrainerWorker, config: Config) -> tuple[TrainRequest, Trajectory]:
    """Returns a request to train a group, of one micro-batch and forward pass per rank, and its trajectory."""
    size, steps, ranks = config.group_size, config.rollout.num_inference_steps, config.trainer.num_workers
    drawn = draw_window(config.algorithm, num_inference_steps=steps, seed=config.seed, step=0, group=0)
    points = {point for step in drawn.train_steps if drawn.noise_steps for point in (step, step + 1)} or {steps}
    policy, trained = worker.policy, drawn.train_steps[: _columns(config)]
    trajectory = Trajectory(
        latents=np.zeros((size, len(points), *policy.latent_shape(config.rollout.resolution)), np.float32),
        points=tuple(sorted(points)),
        train_steps=trained,
        log_probs=np.zeros((size, len(trained)), np.float32),
        sigmas=np.linspace(1.0, 0.0, steps + 1, dtype=np.float32),
        conditioning=conditioning(policy),
    )
    # A micro-batch for every rank.
    per_part = config.trainer.micro_batch_size
    parts = cut(worker.algorithm.select(_advantages(config))[: per_part * ranks], per_part)
    meta = GroupMeta(
        group=0,
        tickets=1,
        version=worker.versions.newest - config.max_staleness,
        age=config.max_staleness,
        advantages=tuple(_advantages(config).tolist()),
        parts=parts,
        seeds=tuple(range(size)),
        negative=NEGATIVE,
        sampling=sampling(config),
        owners=tuple(range(len(parts))),
        prompt=Prompt(index=0, text=""),
    )
    return TrainRequest(worker.versions.newest, (meta,), StepPlan(rows=1)), trajectory


def _advantages(config: Config) -> npt.NDArray[np.float64]:
    return np.linspace(-1.0, 1.0, config.group_size)


def _counts(worker: TrainerWorker, config: Config) -> dict[str, int]:
    # Counts the passes of a training step on the rank that has the most.
    # Passes without gradient are the behaviour, the reference, the average and, for all optimizer steps but the first,
    # the proximal policy; and those before the loss of an algorithm with `group_terms`. Ranks that share the trained
    # weights compute the parts of one group after the other (`World.by_group`).
    trainer, algorithm = config.trainer, worker.algorithm
    selected = len(algorithm.select(_advantages(config)))
    columns = trained_steps(config) // _columns(config)
    parts = -(-selected // trainer.micro_batch_size)
    groups, updates = config.prompts_per_step, trainer.updates_per_batch
    later = groups - groups // updates if keeps_proximal(algorithm) else 0

    def most(of_groups: int) -> int:
        if worker.world.by_group:
            return of_groups * -(-parts // trainer.num_workers) * columns
        return -(-of_groups * parts // trainer.num_workers) * columns

    stale = config.max_staleness > 0 or worker.versions.sampling is not None
    behaviour = groups if "behaviour" in algorithm.needs and stale else 0
    compared = groups * len({"reference", "average", "teacher"}.intersection(algorithm.needs))
    if hasattr(algorithm, "group_terms") and parts > 1:
        compared = 2 * compared + groups
    return {
        "micro_batches": updates * most(groups // updates),
        "frozen_passes": most(later) + most(behaviour) + most(compared),
        "optimizer_steps": updates,
    }
