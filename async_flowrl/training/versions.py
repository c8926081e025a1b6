"""Copies of the trained weights that a trainer rank keeps: the last versions, and moving averages."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from async_flowrl.algorithms.ema import ema_decay, old_policy_decay, samples_from_average, update_average
from async_flowrl.config.schema import Config
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.flat import FlatParameters
from async_flowrl.types import EMA, POLICY

# Number of elements of two versions that are compared at a time; the comparison needs one byte per element.
_COMPARED_ELEMENTS = 1 << 26


class Versions:
    """Flat vectors in the layout of `parameters`. Version n makes images after n training steps.

    `ema` is a moving average for evaluations, `sampling` one from which rollouts sample (DiffusionNFT): float32 or
    None.
    """

    def __init__(self, config: Config, parameters: FlatParameters, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes` maps the name of a tensor to the dtype in which the network uses it and in which it is sent."""
        self._config, self._parameters, self.dtypes = config, parameters, dtypes
        # Dtype in which versions are kept: the widest of `dtypes`.
        self.dtype = functools.reduce(torch.promote_types, dtypes.values())
        algorithm = config.algorithm
        averaged = samples_from_average(algorithm.name, algorithm.old_policy_decay)
        self.sampling: Tensor | None = parameters.snapshot() if averaged else None
        self.ema: Tensor | None = parameters.snapshot() if config.trainer.ema_decay is not None else None
        # The last max_staleness + 1 versions; images that are not trained yet can have only these versions.
        self.retained: dict[int, Tensor] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._changed: Tensor | None = None
        self.retain(0)

    @property
    def newest(self) -> int:
        """The newest version."""
        return max(self.retained)

    def after_optimizer_step(self, steps: int) -> None:
        """Updates the EMA if `steps`, the optimizer steps so far, is a multiple of `trainer.ema_every`."""
        trainer = self._config.trainer
        if self.ema is not None and trainer.ema_decay is not None and steps % trainer.ema_every == 0:
            update_average([self.ema], [self._parameters.values.data], ema_decay(steps, trainer.ema_decay))

    def after_batch(self, step: int, steps: int) -> None:
        """Updates `sampling` and keeps version step + 1, after training step `step` and `steps` optimizer steps."""
        if self.sampling is not None:
            decay = old_policy_decay(self._config.algorithm.old_policy_decay, steps)
            update_average([self.sampling], [self._parameters.values.data], decay)
        self.retain(step + 1)

    def retain(self, version: int) -> None:
        """Keeps a copy of the weights from which rollouts sample as `version`, and removes versions too old."""
        oldest = version - self._config.max_staleness
        # Old ones are removed first to save memory, because a version can be a whole model.
        self._forget_before(min(oldest, version - 1))
        source = self._parameters.values.data if self.sampling is None else self.sampling
        before, now = self.retained.get(version - 1), source.to(self.dtype, copy=True)
        self._changed = None
        if before is not None and self.dtype != torch.float32:
            # The changes are counted now, because with max_staleness=0 the version before is not kept.
            pairs = zip(torch.split(before, _COMPARED_ELEMENTS), torch.split(now, _COMPARED_ELEMENTS), strict=True)
            self._changed = torch.stack([torch.count_nonzero(old.ne(new)) for old, new in pairs]).sum()
        self.retained[version] = now
        self._forget_before(oldest)

    def _forget_before(self, oldest: int) -> None:
        for old in [v for v in self.retained if v < oldest]:
            del self.retained[old]

    def keep(self, stream: str, version: int) -> None:
        """Copies `version` of a stream, if it is still retained, to host memory until `release`."""
        source = self.ema if stream == EMA else self.retained.get(version)
        if source is not None and (stream, version) not in self._kept:
            self._kept[stream, version] = source.to("cpu", copy=True)

    def release(self, stream: str, version: int) -> None:
        """Ends a `keep`; does nothing where there was none."""
        self._kept.pop((stream, version), None)

    @property
    def kept(self) -> Mapping[tuple[str, int], Tensor]:
        """Stream and version → flat copies in host memory, by `keep`."""
        return dict(self._kept)  # Other threads iterate over it.

    def take_kept(self, kept: Mapping[tuple[str, int], Tensor]) -> None:
        """Keeps what the rank had kept whose state this one takes over."""
        self._kept = dict(kept)

    def sendable(self, stream: str, version: int) -> Tensor | None:
        """Returns the weights of a version of a stream, where they lie; None if they are not here."""
        if (kept := self._kept.get((stream, version))) is not None:
            return kept
        return self.retained.get(version) if stream == POLICY else self.ema if version == self.newest else None

    def changed_share(self) -> float | None:
        """Returns the share of elements that the newest version changed; None for float32."""
        if self._changed is None:
            return None
        return self._parameters.total(int(self._changed)) / self._parameters.numel

    def of(self, version: int) -> Tensor:
        """Returns the weights of a version. Raises KeyError if they are no longer kept."""
        if version not in self.retained:
            raise KeyError(f"version {version} is not kept; the trainer has {sorted(self.retained)}")
        return self.retained[version]

    def reference(self, *, needed: bool) -> Tensor | None:
        """Returns the flat weights of the KL's reference; None without one, or if it is the bare base."""
        if self._config.lora.path is not None:
            # A warm start is the policy to stay close to, not the bare base model.
            return self._parameters.snapshot()
        # A version is never written to, so that this one stays what the run started at.
        return self.of(0) if needed and tuning_of(self._config).whole else None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Returns parts of a checkpoint: name of the part (retained, ema, sampling) → name → CPU tensor."""
        parts = {"retained": {}, **{n: self._named(t) for n, t in self._averages().items()}}
        for version, flat in self.retained.items():
            tensors = self._named(flat).items()
            parts["retained"] |= {f"{version}/{name}": tensor.to(self.dtypes[name]) for name, tensor in tensors}
        return parts

    def load(self, parts: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restores what `state` returned. Raises ValueError if parts or tensors differ from this run's."""
        for name, flat in self._averages().items():
            if name not in parts:
                raise ValueError(f"the checkpoint has no {name} weights, which this run needs")
            flat.copy_(self._parameters.pack(parts[name], where=name))
        by_version: dict[int, dict[str, Tensor]] = {}
        for key, tensor in parts["retained"].items():
            version, name = key.split("/", 1)
            by_version.setdefault(int(version), {})[name] = tensor
        self.retained = {
            version: self._parameters.pack(tensors, where=f"retained version {version}", dtype=self.dtype)
            for version, tensors in sorted(by_version.items())
        }
        self._changed = None

    def _averages(self) -> dict[str, Tensor]:
        return {name: flat for name, flat in (("ema", self.ema), ("sampling", self.sampling)) if flat is not None}

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return self._parameters.named(flat.to("cpu", copy=True))
