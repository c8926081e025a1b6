"""ToyTrainer, the trainer rank's model of toy runs (toy.py), with real checkpoints."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from async_flowrl.algorithms.ema import DECAYS, ema_decay, update_average
from async_flowrl.config.schema import FULL, Config
from async_flowrl.training.checkpoint import (
    Checkpoint,
    PackedState,
    held_in,
    read_checkpoint,
    with_held,
    write_checkpoint,
)
from async_flowrl.training.exact import TAIL, Account, ExactSum, mark_of, to_digits
from async_flowrl.training.messages import GroupMeta, Manifest, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.parts import World, parts_of
from async_flowrl.training.trust_region import MEASURED_EVERY_STEPS
from async_flowrl.types import EMA, Trajectory
from checkpoint_engine import weights_digest
from tests.support.failing_disk import failing_disk
from tests.support.toy_weights import LORA, SIZE, ToySender, copied, flattened, toy_tensors, unflattened

SAMPLING = "sampling"
"""Name of the old policy in checkpoints, an average of the trained weights that images are made with."""


class OverPeers:
    """The all-reduce of toy ranks, for int64 only; other dtypes are left as they are."""

    def __init__(self, one: "ToyTrainer") -> None:
        self._ranks, self._of = one.ranks(), (one.step, one.plan.attempt)
        self.size = len(self._ranks)

    def sum(self, values: torch.Tensor) -> None:
        if values.dtype == torch.int64:
            values.copy_(torch.stack([rank.contribution(self._of) for rank in self._ranks]).sum(0))


def whole_or_lora(config: Config) -> Mapping[str, Any]:
    """Returns what the versions say of the LoRA; with whole weights nothing."""
    return {} if config.tune == FULL else LORA


class ToyTrainer:
    """A trainer with momentum on a made-up loss that depends on every trajectory and advantage; real checkpoints."""

    sum_of_gradients: type[ExactSum] = ExactSum

    def __init__(self, config: Config, index: int, name: str) -> None:
        self.config, self.index = config, index
        self.tensors = {name: self.own(tensor).clone() for name, tensor in toy_tensors(config.seed).items()}
        self.momentum = self.own(torch.zeros(SIZE, 2))
        self.spoil: str | None = None
        """Fault of the next checkpoint's writing: "torn" or "full" (see `failing_disk`), or None."""
        self._snapshots: dict[int, Checkpoint] = {}
        self.retained = {0: self._copy()}
        kept = {EMA: config.trainer.ema_decay is not None, SAMPLING: config.algorithm.old_policy_decay != "copy"}
        self.averages = {name: self._copy() for name, wanted in kept.items() if wanted}
        """The moving average for evaluations, and the old policy that images are made with, as the run has them."""
        self.sender = self.versions = ToySender(
            self.tensors, self.retained, self.averages, config.live_versions, whole_or_lora(config)
        )
        self.update = self
        """This object has the methods of the real worker's part `update`, too."""
        self.trained: list[tuple[int, int, int]] = []
        """(step, group, version) of every trained group, in order."""
        self.ranks: Callable[[], Sequence[ToyTrainer]] = lambda: [self]
        """Returns all ranks. Their sums are complete when one of them finishes, as the controller waits for that."""
        self.sum = self.sum_of_gradients(2 * SIZE, torch.device("cpu"))
        self.step, self.plan = -1, StepPlan(rows=0)
        self.given = 0
        self._contribution: torch.Tensor | None = None
        self._asked = False
        """Whether the optimizer step under way is to be measured if it is due."""

    @property
    def position(self) -> World:
        return World(self.index, self.config.trainer.num_workers)

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a whole tensor that this rank has: all of them."""
        return whole

    def whole(self, name: str) -> torch.Tensor:
        """Returns all rows of a tensor."""
        return self.tensors[name]

    def load(self, settings: Any = None) -> dict[str, Any]:
        report = {"base_digest": "toy", "device": "cpu", "device_kind": "toy"}
        return {**report, "ranks_per_replica": self.position.per_replica}

    def proximal(self, request: TrainRequest, *trajectories: Trajectory) -> None:
        """The loss has no ratio, so there is nothing to predict."""

    def train(self, request: TrainRequest, *trajectories: Trajectory) -> Manifest:
        if request.begins is not None:
            self.begin(request.step, request.begins)
        self.accumulate(request.metas, *trajectories, tickets=request.tickets)
        return Manifest(self.step, self.plan.update, self.plan.attempt, tuple(self.parts))

    def begin(self, step: int, plan: StepPlan) -> None:
        self.step, self.plan = step, plan
        self.sum.begin()
        self.parts: list[tuple[int, int]] = []
        self._contribution = None

    def accumulate(
        self, metas: Sequence[GroupMeta], *trajectories: Trajectory, tickets: Sequence[Sequence[int]] = ()
    ) -> None:
        left = iter(trajectories)
        self.given += len(trajectories)
        held = [dict(zip(own, left, strict=False)) for own in tickets or [range(meta.tickets) for meta in metas]]
        for part in parts_of(metas, self.position):
            if not part.counts:
                continue
            meta = metas[part.group]
            images, chosen = len(meta.advantages) // meta.tickets, meta.parts[part.part]
            rows = [held[part.group][image // images].latents[image % images] for image in chosen]
            latents = torch.from_numpy(np.stack(rows))
            weights = torch.tensor([meta.advantages[image] for image in chosen], dtype=torch.float32)[:, None]
            gradient = (weights * latents).T @ (latents @ self.whole("layer.lora_A.weight").T)
            largest = float(self.sum.add(gradient.flatten()))
            self.sum.book(mark_of(self.step, self.plan.update, meta.group, part.part), largest)
            self.parts.append((meta.group, part.part))
            self._contribution = None
            if part.part == 0:
                self.trained.append((self.step, meta.group, meta.version))

    def contribution(self, of: tuple[int, int]) -> torch.Tensor:
        """Returns this rank's part of the sum over ranks, with its account; zeros if it has not begun attempt `of`."""
        if of != (self.step, self.plan.attempt):
            return torch.zeros_like(self.sum.values)
        if self._contribution is None:
            self._contribution = self.sum.values.clone()
            self._contribution[-TAIL:] = torch.tensor(to_digits(self.sum.account))
        return self._contribution

    def add_up(self, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        if request.begins is not None:
            self.begin(request.step, request.begins)
        assert request.attempt == self.plan.attempt
        self._asked = request.probe is not None or self.position.size == 1
        self.given += len(request.probe_tickets)
        self.account = account = self.sum.reduce(cast("Any", OverPeers(self)))
        if request.planned is not None:
            parts = [(group, part) for group, count in request.planned for part in range(count)]
            marks = [mark_of(self.step, self.plan.update, group, part) for group, part in parts]
            planned = reduce(Account.plus, marks, Account())
            assert account.holds(planned), f"{account} is not {planned}"
        return None

    def take_step(self) -> UpdateStats:
        account, before = self.account, self._copy()
        taken = self.step * self.config.trainer.updates_per_batch + self.plan.update
        fetched = (0,) * self.given
        self.given = 0
        if account.count:
            gradient = torch.empty(2 * SIZE)
            self.sum.mean(gradient, self.plan.rows)
            gradient = gradient.reshape(SIZE, 2)
            self.momentum = 0.5 * self.momentum + self.own(gradient / (1e-6 + gradient.norm()))
            self.tensors["layer.lora_B.weight"] += 0.1 * self.momentum
            if self.config.trainer.ema_decay is not None:
                self._average(EMA, ema_decay(taken + 1, self.config.trainer.ema_decay))
        if self.plan.update == self.config.trainer.updates_per_batch - 1:
            if SAMPLING in self.averages:
                self._average(SAMPLING, DECAYS[self.config.algorithm.old_policy_decay](taken + 1))
            self.retained[self.step + 1] = copied(self.averages.get(SAMPLING, self.tensors))
            for old in [v for v in self.retained if v < self.step + 1 - self.config.max_staleness]:
                del self.retained[old]
            if self.index == 0 and self.config.tune != FULL:
                self.snapshot()
        skipped, digest = account.count == 0, self.agreed()
        metrics = {"loss": 0.0}
        if self._asked and self._due(taken) and not skipped:
            metrics |= self._moved(before)
        return UpdateStats(
            self.step,
            self.plan.update,
            skipped,
            metrics,
            measures_next=self._due(taken + 1),
            fetched=fetched,
            digest=digest,
        )

    def measures_alone(self) -> bool:
        """Whether this is the only rank, and the optimizer step under way is measured."""
        taken = self.step * self.config.trainer.updates_per_batch + self.plan.update
        return self.position.size == 1 and self._due(taken)

    def _due(self, steps: int) -> bool:
        """Whether the optimizer step after so many is measured, as TrustRegion.due says it."""
        algorithm = self.config.algorithm
        every = algorithm.max_kl_per_update is not None or steps % MEASURED_EVERY_STEPS == 0
        return every and algorithm.kl_probe_images > 0

    def _moved(self, before: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """How far the weights have moved, in place of a KL."""
        return {"kl_per_update": float(sum((self.tensors[name] - old).norm() for name, old in before.items()))}

    def kept_state(self, version: int) -> tuple[str, PackedState]:
        state = PackedState.of(self.with_held(self._snapshots[version]))
        return state.digest(), state

    def with_held(self, checkpoint: Checkpoint) -> Checkpoint:
        return with_held(checkpoint, {key: flattened(tensors) for key, tensors in self.versions.kept.items()})

    def take_over(self, digest: str, state: PackedState, held: Collection[int] = ()) -> str:
        assert state.digest() == digest
        found = state.checkpoint()
        self._restore(found)
        self.versions.kept = {key: unflattened(flat) for key, flat in held_in(found).items() if key in held}
        return self.weights_digest()

    def snapshot(self) -> int:
        version = max(self.retained)
        retained = {f"{v}/{name}": t for v, tensors in self.retained.items() for name, t in tensors.items()}
        parts = {"weights": self._copy(), "optimizer": {"momentum": self.momentum.clone()}, "retained": retained}
        parts |= {name: copied(average) for name, average in self.averages.items()}
        trainer = {
            "version": version,
            "weights_digest": self.weights_digest(),
            "lora": whole_or_lora(self.config) or None,
        }
        self._snapshots[version] = Checkpoint(parts, trainer, {})
        return version

    def save(self, version: int, directory: str, controller: Mapping[str, Any], spare: Sequence[int] = ()) -> str:
        found, spoil, self.spoil = self.with_held(self._snapshots[version]), self.spoil, None
        assert version == controller["version"] == found.trainer["version"]
        keep = self.config.save.keep
        whole = Checkpoint(found.tensors, found.trainer, controller)
        # The first eight calls write the checkpoint. Only "torn" may hit a later one: "full" must spoil the checkpoint.
        with failing_disk(spoil, at=1 + 5 * version % (8 if spoil == "full" else 11)):
            return str(write_checkpoint(Path(directory), version, whole, keep=keep, spare=spare))

    def restore(self, path: str, held: Collection[tuple[str, int]] = ()) -> int:
        found = read_checkpoint(Path(path))
        self._restore(found)
        self.versions.kept = {key: unflattened(flat) for key, flat in held_in(found).items() if key in held}
        return int(found.trainer["version"])

    def _restore(self, found: Checkpoint) -> None:
        self.tensors = {name: found.tensors["weights"][name].clone() for name in self.tensors}
        self.momentum = found.tensors["optimizer"]["momentum"].clone()
        for name in self.averages:
            self.averages[name] = {key: found.tensors[name][key].clone() for key in self.tensors}
        self.retained.clear()
        for key, tensor in found.tensors["retained"].items():
            version, name = key.split("/")
            self.retained.setdefault(int(version), {})[name] = tensor.clone()
        self.sender.clear()

    def _average(self, name: str, decay: float) -> None:
        update_average(self.averages[name].values(), self.tensors.values(), decay)

    def _copy(self) -> dict[str, torch.Tensor]:
        return copied(self.tensors)

    def agreed(self) -> str:
        """Returns a digest that must be equal on all ranks after an optimizer step."""
        return self.weights_digest()

    def weights_digest(self) -> str:
        return weights_digest(self.tensors)
