"""The state of a trainer rank that a checkpoint has: weights, optimizer, versions, counters, the algorithm's state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import ResolvedModel, check_revision
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.checkpoint import Checkpoint
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.training.update import Update
from async_flowrl.training.versions import Versions


@runtime_checkable
class Stateful(Protocol):
    """Algorithm whose state lasts from batch to batch, and is therefore saved in checkpoints."""

    def state_dict(self) -> Mapping[str, Tensor]: ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class RankState:
    """The objects of a rank that have state; it copies their state, and gives it back to them."""

    config: Config
    model: ResolvedModel
    algorithm: Algorithm
    parameters: FlatParameters
    optimizer: Optimizer
    versions: Versions
    update: Update

    def counters(self) -> dict[str, Any]:
        """Returns the part of the state that is no tensors, as JSON values.

        Raises RuntimeError while an optimizer step is under way, because the weights lack the gradients that it has
        added.
        """
        if (step := self.update.under_way) is not None:
            raise RuntimeError(f"step {step} is under way: what was added to it is not in the weights yet")
        tuning = tuning_of(self.config)
        return {
            "version": self.versions.newest,
            "optimizer_steps": self.optimizer.steps,
            "sum_exponent": self.update.exponent,
            "lora": None if tuning.rank is None else {"rank": tuning.rank, "alpha": tuning.alpha},
            "model": {"path": self.config.model.path, "revision": self.model.revision},
        }

    def copied(self) -> Checkpoint:
        """Returns a copy of the whole state. Raises RuntimeError as `counters`."""
        return Checkpoint(self.tensors(), self.counters(), {})

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Returns copies on the CPU of all tensors, by part and name. It hashes nothing: that is left to the writing.

        It may run beside the gradients of the next step: what changes these tensors waits for it, the end of a
        step and forward passes under other weights (`FlatParameters.before_change`).
        """
        tensors: dict[str, Mapping[str, Tensor]] = {
            "weights": self.parameters.named(self.parameters.values.data.to("cpu", copy=True)),
            "optimizer": self.optimizer.state(),
            **self.versions.state(),
        }
        if isinstance(self.algorithm, Stateful):
            tensors["algorithm"] = {n: t.to("cpu", copy=True) for n, t in self.algorithm.state_dict().items()}
        return tensors

    def check(self, checkpoint: Checkpoint, path: str) -> None:
        """Raises ValueError if the checkpoint read from `path` has another model revision or other trained tensors."""
        check_revision(checkpoint.trainer, self.model, path)
        own = self.parameters.named(self.parameters.values.data)
        if odd := sorted(checkpoint.tensors["weights"].keys() ^ own.keys()):
            raise ValueError(
                f"checkpoint {path} is of a run that trained other tensors: {odd[0]} is only in one of them "
                f"({len(odd)} names differ); tune, full.freeze, lora.targets and the model must be as they were, or "
                "output_dir another"
            )

    def load(self, checkpoint: Checkpoint) -> None:
        """Gives the objects the state of a checkpoint that `check` accepts."""
        self.parameters.load(self.parameters.pack(checkpoint.tensors["weights"], where="weights"))
        self.optimizer.load(checkpoint.tensors["optimizer"], int(checkpoint.trainer["optimizer_steps"]))
        self.update.exponent = int(checkpoint.trainer["sum_exponent"])
        self.versions.load(checkpoint.tensors)
        if isinstance(self.algorithm, Stateful):
            self.algorithm.load_state_dict(checkpoint.tensors["algorithm"])
