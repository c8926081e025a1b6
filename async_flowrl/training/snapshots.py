"""The state of a trainer rank, and its copies in host memory, for which whoever changes the state waits."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import time
from typing import Any

from torch import Tensor

from async_flowrl.policies.registry import ResolvedModel, check_revision
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.checkpoint import Checkpoint
from async_flowrl.training.forward_passes import UpdateInputs
from async_flowrl.training.update import Update
from async_flowrl.training.versions import Versions
from async_flowrl.types import Span
from checkpoint_engine.side_stream import SideStream, on, recorded

# Number of the newest copies that are retained: the one under way, and one whose version may still be asked for.
RETAINED = 2


class Snapshots:
    """The state of a rank and its copies. `begin` and `wait` are for the lane that trains, `of` is for any."""

    def __init__(self, inputs: UpdateInputs, model: ResolvedModel, versions: Versions, update: Update) -> None:
        self.inputs, self.model, self.versions, self.update = inputs, model, versions, update
        tuning = tuning_of(inputs.config)
        self._lora = None if tuning.rank is None else {"rank": tuning.rank, "alpha": tuning.alpha}
        self._side = SideStream.of(inputs.device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._copies: dict[int, Future[Checkpoint]] = {}
        self._under_way: Future[Checkpoint] | None = None

    def counters(self) -> dict[str, Any]:
        """Returns the state without tensors, as JSON. Raises RuntimeError while an optimizer step is under way."""
        if (step := self.update.under_way) is not None:
            raise RuntimeError(f"step {step} is under way: what was added to it is not in the weights yet")
        return {
            "version": self.versions.newest,
            "optimizer_steps": self.inputs.optimizer.steps,
            "expert_steps": self.inputs.optimizer.expert_steps,
            "sum_exponent": self.update.exponent,
            "lora": self._lora,
            "model": {"path": self.inputs.config.model.path, "revision": self.model.revision},
        }

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Returns CPU copies of all tensors, by part and name; it may run beside the next gradients."""
        tensors: dict[str, Mapping[str, Tensor]] = {
            "weights": self.inputs.parameters.named(self.inputs.parameters.values.data.to("cpu", copy=True)),
            "optimizer": self.inputs.optimizer.state(),
            **self.versions.state(),
        }
        if (state_dict := getattr(self.inputs.algorithm, "state_dict", None)) is not None:
            tensors["algorithm"] = {name: tensor.to("cpu", copy=True) for name, tensor in state_dict().items()}
        return tensors

    def check(self, checkpoint: Checkpoint, path: str) -> None:
        """Raises ValueError if the checkpoint read from `path` has another model revision or other trained tensors."""
        check_revision(checkpoint.trainer, self.model, path)
        tensors = self.inputs.parameters.named(self.inputs.parameters.values.data)
        if odd := sorted(checkpoint.tensors["weights"].keys() ^ tensors.keys()):
            raise ValueError(
                f"checkpoint {path} is of a run that trained other tensors: {odd[0]} is only in one of them "
                f"({len(odd)} names differ); tune, full.freeze, lora.targets and the model must be as they were, or "
                "output_dir another"
            )

    def load(self, checkpoint: Checkpoint) -> None:
        """Takes over the state, and forgets all copies."""
        self.wait()
        self._copies.clear()
        self.inputs.parameters.load(self.inputs.parameters.pack(checkpoint.tensors["weights"], where="weights"))
        steps, of_experts = checkpoint.trainer["optimizer_steps"], checkpoint.trainer["expert_steps"]
        self.inputs.optimizer.load(checkpoint.tensors["optimizer"], int(steps), of_experts)
        self.update.exponent = int(checkpoint.trainer["sum_exponent"])
        self.versions.load(checkpoint.tensors)
        if (load_state_dict := getattr(self.inputs.algorithm, "load_state_dict", None)) is not None:
            load_state_dict(checkpoint.tensors["algorithm"])

    def begin(self) -> int:
        """Begins to copy the state; returns its version. Raises RuntimeError while an optimizer step is under way."""
        counters = self.counters()
        version = int(counters["version"])
        if version not in self._copies:
            ready = recorded(self.inputs.device)  # The copy must not read what the device has still to write.
            self._under_way = self._copies[version] = self._thread.submit(self._copied, counters, ready)
            for old in sorted(self._copies)[:-RETAINED]:
                del self._copies[old]
        return version

    def wait(self) -> tuple[Span, ...]:
        """Waits until nothing is being copied, so that the state may change; returns the time of the wait, if any."""
        under_way, self._under_way = self._under_way, None
        if under_way is None or under_way.done():
            return ()
        began = time()
        under_way.result()
        return (Span("wait_snapshot", began, time()),)

    def of(self, version: int) -> Checkpoint:
        """Returns the copy of a version. Raises KeyError if it was not begun, or if newer ones have replaced it."""
        return self._copies[version].result()

    def forget(self, version: int) -> None:
        self._copies.pop(version, None)

    def _copied(self, counters: dict[str, Any], ready: Any) -> Checkpoint:
        with on(self._side):
            if self._side is not None:
                self._side.wait(ready)
            copy = Checkpoint(self.tensors(), counters, {})
            if self._side is not None:
                self._side.synchronize()
        return copy
