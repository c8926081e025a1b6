"""The sending end of this rank's share of the weights, for tune=full with trainer.shard=full: every rank has one."""

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.seeds import derive
from async_flowrl.training.publishing import PublishedStreams
from async_flowrl.training.sharded_parameters import ShardedParameters
from async_flowrl.training.versions import Versions
from checkpoint_engine import CANARY_VERSION, Layout, canary_tensors, tensor_probe
from checkpoint_engine.layout import dtype_of
from checkpoint_engine.shards import shard_rows


class ShardedStreams(PublishedStreams):
    """As PublishedStreams, of the rows that this rank has of each tensor."""

    def __init__(self, config: Config, policy: Policy, parameters: ShardedParameters, versions: Versions) -> None:
        super().__init__(config, policy, parameters, versions)
        self._sharded = parameters

    def whole_layout(self) -> Layout:
        """Returns the layout of whole tensors, in the dtypes that are sent."""
        whole = {name: torch.empty(shape, device="meta") for name, shape in self._sharded.wholes.items()}
        return Layout.of(whole, self._versions.dtypes)

    def canary(self) -> dict[str, Tensor]:
        """Stages this rank's rows of the canary; returns the probe of the whole network with it, equal on all ranks.

        The ranks gather one tensor after the other, so all must call it together.
        """
        flat = self._canary()
        self._stage(self.policy, CANARY_VERSION, flat)
        live = tuning_of(self._config).parameters(self._policy.transformer)
        probe: dict[str, Tensor] = {}
        with self._parameters.swapped(flat):
            for name, dtype in sorted(self._versions.dtypes.items()):
                probe |= tensor_probe({name: self._sharded.gathered(live[name]).to(dtype)})
        return probe

    def _canary(self) -> Tensor:
        """One whole tensor at a time is drawn, so that its values don't depend on the number of ranks."""
        seed, world = derive(self._config.seed, "canary"), self._sharded.world
        rows = {}
        for entry in self.whole_layout().entries:
            whole = canary_tensors(Layout((entry,), entry.nbytes), seed)[entry.name]
            own = shard_rows(entry.shape[0], world.size, world.rank)
            rows[entry.name] = whole[own.start : own.stop].to(dtype_of(entry))
        return self._parameters.pack(rows, where="canary", dtype=self._versions.dtype)
