"""The trainer rank: a plain class with the model, its optimizer and the sending end of the weights.

Calls run one at a time on the main lane; sealing, sending and writing checkpoints have lanes of their own.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from async_flowrl.algorithms.base import Algorithm, differentiates_reward
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.resolution import Resolution, configured
from async_flowrl.config.schema import Config, TrainerConfig
from async_flowrl.observability.flops import device_kind, device_peak, reserved_memory
from async_flowrl.policies.kernels import repeatable_kernels
from async_flowrl.policies.lora import read_teacher
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.checkpoint import (
    Checkpoint,
    PackedState,
    check_ranks,
    held_in,
    read_checkpoint,
    with_held,
    write_checkpoint,
)
from async_flowrl.training.differentiable_reward import DifferentiableReward
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.forward_passes import UpdateInputs
from async_flowrl.training.fsdp import prefetch
from async_flowrl.training.messages import Manifest, TrainRequest, UpdateStats
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.training.parts import World
from async_flowrl.training.rank_model import load_model
from async_flowrl.training.sharded import ShardedParameters, ShardSaving
from async_flowrl.training.snapshots import Snapshots
from async_flowrl.training.update import Update
from async_flowrl.training.versions import GatheredStreams, PublishedStreams, Versions
from async_flowrl.transfers import ONE_AT_A_TIME
from async_flowrl.types import Trajectory
from checkpoint_engine import weights_digest
from separation.node import bind

logger = logging.getLogger(__name__)

# A step that changes a smaller share of what is trained, as it is computed with, is worth a warning.
MIN_CHANGED_SHARE = 0.01


class TrainerWorker:
    """One rank of the trainer, with all trained tensors, or a share of them (`World.by_group`); `load` comes first."""

    def __init__(
        self,
        config: Config,
        model: ResolvedModel,
        index: int,
        name: str,
        sizes: Sequence[Resolution] = (),
        *,
        base: OneBase | None = None,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`sizes`: of trained images (empty: the configuration's); `base` and `turn`: of a shared process."""
        self.config, self.model, self.index, self.name = config, model, index, name
        self._one_base, self._turn = base, turn
        self._sizes = sizes or configured(config.rollout)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if config.deterministic:
            repeatable_kernels()
        if config.runtime.numa_binding:
            logger.info("NUMA: this worker %s", bind())
        self.world = World()
        self.algorithm: Algorithm = build_algorithm(config)
        self.policy: PipelinePolicy
        self.parameters: FlatParameters
        self.optimizer: Optimizer
        self.versions: Versions
        self.update: Update
        self.saving: ShardSaving  # Set only if this rank has a share of the trained weights.
        self.snapshots: Snapshots
        # The sending end of the weights, on the first rank only, or on each if it has a share of them.
        self.sender: PublishedStreams
        self._warned_of_rounding = False

    def load(self, settings: TrainerConfig | None = None) -> dict[str, Any]:
        """Builds model, adapter and optimizer; `settings` have no `auto`. Returns digests, numbers and the device."""
        if settings is not None:
            self.config = replace(self.config, trainer=settings)
        with ONE_AT_A_TIME:
            return self._load()

    def _load(self) -> dict[str, Any]:
        base, world = self._one_base, World.current()
        self.policy, dtypes, self.world, report = load_model(
            self.config, self.model, device=self.device, sizes=self._sizes, one_base=base, world=world
        )
        trained = tuning_of(self.config).parameters(self.policy.transformer)
        if self.world.by_group:
            self.parameters = ShardedParameters(trained, self.policy, self.world, self.device)
            self.saving = ShardSaving(self.world)
        else:
            self.parameters = FlatParameters(trained, self.device, self.policy.experts)
        prefetch(self.policy, self.config.trainer.prefetch)
        self.optimizer = Optimizer(self.config.trainer, self.parameters)
        self.versions = Versions(self.config, self.parameters, dtypes)
        if self._sends:
            self.sender = self._new_sender()
        differentiates = differentiates_reward(self.algorithm)
        reward = DifferentiableReward(self.config, self.model, self.device) if differentiates else None
        made = UpdateInputs(
            config=self.config,
            policy=self.policy,
            algorithm=self.algorithm,
            parameters=self.parameters,
            optimizer=self.optimizer,
            world=self.world,
            device=self.device,
            sampled_by=self.versions.of,
            averaged=self.versions.sampling is not None,
            reference=self.versions.reference(needed="reference" in self.algorithm.needs),
            average=self.versions.average,
            teachers=self._teachers(),
            reward=reward,
            turn=self._turn,
        )
        self.update = Update(made)
        self.snapshots = Snapshots(made, self.model, self.versions, self.update)
        self.parameters.before_change = self.snapshots.wait
        peak = self.config.hardware.peak_tflops
        return report | {
            "ranks_per_replica": self.world.per_replica,
            "trainable_parameters": self.parameters.numel,
            "trainable_tensors": len(trained),
            "device": str(self.device),
            "device_kind": device_kind(self.device),
            "peak_flops": device_peak() if peak is None else peak * 1e12,
        }

    def _teachers(self) -> dict[str, torch.Tensor]:
        config = self.config
        return {
            label: self.parameters.pack(read_teacher(label, path, config.lora, self.policy), where=f"teacher {label}")
            for label, path in config.algorithm.teachers.items()
        }

    def _new_sender(self) -> PublishedStreams:
        if isinstance(self.parameters, ShardedParameters):
            return GatheredStreams(self.config, self.policy, self.parameters, self.versions)
        return PublishedStreams(self.config, self.policy, self.parameters, self.versions)

    @property
    def _sends(self) -> bool:
        return self.world.rank == 0 or self.world.by_group

    def train(self, request: TrainRequest, *trajectories: Trajectory) -> Manifest:
        """Begins an optimizer step, if `request` says so, and adds gradients of its groups. Raises NonFiniteError."""
        if request.begins is not None:
            self.update.begin(request.step, request.begins)
        if request.metas:
            self.update.accumulate(request.metas, *trajectories, tickets=request.tickets)
        return self.update.manifest

    def add_up(self, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        """Adds up the sums of all ranks, which wait for each other: the first phase; no weight changes."""
        if request.begins is not None:
            self.update.begin(request.step, request.begins)
        return self.update.add_up(request, *trajectories)

    def take_step(self) -> UpdateStats:
        """Changes the weights by the result of `add_up`: the second phase, which waits for no other replica."""
        waited = self.snapshots.wait()
        stats = self.update.take_step()
        spans = [*waited, *stats.spans]
        if spans:
            spans[-1] = replace(spans[-1], memory=reserved_memory())
        stats = replace(stats, spans=tuple(spans))
        if self.world.size > 1:
            stats = replace(stats, digest=self.parameters.fingerprint())
        if not stats.skipped:
            self.versions.after_optimizer_step(self.optimizer.steps)
        if stats.update == self.config.trainer.updates_per_batch - 1:
            self.versions.after_batch(stats.step, self.optimizer.steps)
            if self.world.rank == 0 and self.config.keeps_state:
                self.snapshots.begin()  # The controller fetches it with `kept_state`.
            return self._with_changed_share(stats, self.versions.changed_share())
        return stats

    def _with_changed_share(self, stats: UpdateStats, share: float | None) -> UpdateStats:
        if stats.skipped or share is None:
            return stats
        if share < MIN_CHANGED_SHARE and not self._warned_of_rounding:
            self._warned_of_rounding = True
            logger.warning(
                "step %d changed only %.2g %% of the trained values as rollouts compute with them (%s): the float32 "
                "masters moved, but most of that is lost in rounding until it adds up; consider a larger "
                "trainer.learning_rate, or model.dtype=float32",
                stats.step,
                100 * share,
                self.config.model.dtype,
            )
        return replace(stats, metrics={**stats.metrics, "adapter/changed_share": share})

    def snapshot(self) -> int:
        """Begins to copy the state to host memory; returns its version. Raises RuntimeError during a step."""
        if self.world.by_group:
            copy = Checkpoint(self.snapshots.tensors(), self.snapshots.counters(), {})
            self.saving.snapshot = self.versions.newest, copy
            return self.versions.newest
        return self.snapshots.begin()

    def forget_snapshot(self) -> None:
        """Drops this rank's share of a checkpoint, because it cannot be written."""
        self.saving.snapshot = None

    def kept_state(self, version: int) -> tuple[str, PackedState]:
        """Returns the state at `version`, whose copy the end of that step began, and its digest (lane `keep`)."""
        state = PackedState.of(with_held(self.snapshots.of(version), self.versions.kept))
        return state.digest(), state

    def take_over(self, digest: str, state: PackedState, held: Collection[tuple[str, int]] = ()) -> str:
        """Takes over another process's `kept_state`, of evaluations' versions those in `held`; returns a fingerprint.

        Raises RuntimeError if the state that has arrived has another digest.
        """
        if (came := state.digest()) != digest:
            raise RuntimeError(f"the kept state came with digest {came}, was sent with {digest}")
        self._restore(state.checkpoint(), held)
        return self.parameters.fingerprint()

    def save(self, version: int, directory: str, controller: Mapping[str, Any], spare: Sequence[int] = ()) -> str:
        """Writes the snapshot of `version` to `directory`/step_`version`. Raises KeyError or OSError."""
        checkpoint = with_held(self.snapshots.of(version), self.versions.kept)
        if not self.config.keeps_state:
            self.snapshots.forget(version)
        trainer = {**checkpoint.trainer, "weights_digest": weights_digest(checkpoint.tensors["weights"])}
        whole = Checkpoint(checkpoint.tensors, trainer, controller)
        return str(write_checkpoint(Path(directory), version, whole, keep=self.config.save.keep, spare=spare))

    def restore(self, path: str, held: Collection[tuple[str, int]] = ()) -> int:
        """Takes over a checkpoint, of evaluations' versions those in `held`; returns its version.

        Shares must be verified on all ranks before. Raises DamagedCheckpoint, and ValueError for another model
        revision, other trained tensors, or another number of ranks that have shares.
        """
        if self.world.by_group:
            checkpoint = self.saving.read(path)
        else:
            checkpoint = read_checkpoint(Path(path))
            check_ranks(Path(path), checkpoint.trainer, None)
        self.snapshots.check(checkpoint, path)
        self._restore(checkpoint, held)
        return cast("int", checkpoint.trainer["version"])

    def _restore(self, checkpoint: Checkpoint, held: Collection[tuple[str, int]]) -> None:
        self.snapshots.load(checkpoint)
        if self._sends:
            self.sender.clear()
        self.versions.take_kept({key: flat for key, flat in held_in(checkpoint).items() if key in held})
