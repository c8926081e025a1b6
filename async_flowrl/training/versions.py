"""Copies of the trained weights that a trainer rank keeps: the last versions, and moving averages."""

import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from async_flowrl.algorithms.ema import DECAYS, ema_decay, samples_from_average, update_average
from async_flowrl.config.schema import Config
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.seeds import derive
from async_flowrl.training.flat import ALIGN_ELEMENTS, FlatParameters
from async_flowrl.training.sharded import ShardedParameters
from async_flowrl.transfers import memory_of
from async_flowrl.types import EMA, POLICY, ByteArray
from checkpoint_engine import PROOF_VERSION, Header, Layout, Publisher, VersionGone, proof_tensors, tensor_probe
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.gather import Gather, GatheredVersions, Share, shard_rows
from checkpoint_engine.layout import dtype_of
from checkpoint_engine.publisher import SealedVersions

# Number of elements of two versions that are compared at a time; the comparison needs one byte per element.
_COMPARED_ELEMENTS = 1 << 26


class Versions:
    """Flat vectors in the layout of `parameters`. Version n makes images after n training steps.

    Float32 or None: `ema` is averaged for evaluations, `sampling` for rollouts (DiffusionNFT), `average` for losses.
    """

    def __init__(self, config: Config, parameters: FlatParameters, dtypes: Mapping[str, torch.dtype]) -> None:
        """`dtypes` maps the name of a tensor to the dtype in which the network uses it and in which it is sent."""
        self._config, self._parameters, self.dtypes = config, parameters, dtypes
        self._whole = tuning_of(config).whole
        # Dtype in which versions are kept: the widest of `dtypes`.
        self.dtype = functools.reduce(torch.promote_types, dtypes.values())
        # Memory of the versions that are retained or on their way to rollout workers.
        self.memory = memory_of(config.trainer.versions_on, parameters.values.device)
        algorithm = config.algorithm
        self.sampling: Tensor | None = parameters.snapshot() if samples_from_average(algorithm) else None
        self.average: Tensor | None = parameters.snapshot() if algorithm.average_decay is not None else None
        # The reference that `reference_every` renews.
        renews = algorithm.reference_every is not None
        self.renewed_reference: Tensor | None = parameters.snapshot() if renews else None
        self.ema: Tensor | None = parameters.snapshot() if config.trainer.ema_decay is not None else None
        # The last max_staleness + 1 versions; images that are not trained yet can have only these versions.
        self.retained: dict[int, Tensor] = {}
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._changed: Tensor | None = None
        self.retain(0)

    @property
    def newest(self) -> int:
        return max(self.retained)

    def after_optimizer_step(self, steps: int) -> None:
        """Updates the EMA if `steps`, the optimizer steps so far, is a multiple of `trainer.ema_every`."""
        trainer = self._config.trainer
        if self.ema is not None and trainer.ema_decay is not None and steps % trainer.ema_every == 0:
            update_average([self.ema], [self._parameters.values.data], ema_decay(steps, trainer.ema_decay))

    def after_batch(self, step: int, steps: int) -> None:
        """Updates averages and reference and keeps version step + 1; `steps` optimizer steps were made in all."""
        algorithm = self._config.algorithm
        for flat, decay in ((self.sampling, algorithm.old_policy_decay), (self.average, algorithm.average_decay)):
            if flat is not None and decay is not None:
                update_average([flat], [self._parameters.values.data], DECAYS[decay](steps))
        if self.renewed_reference is not None and (step + 1) % cast("int", algorithm.reference_every) == 0:
            self.renewed_reference.copy_(self._parameters.values.data)
        self.retain(step + 1)

    def retain(self, version: int) -> None:
        """Keeps a copy of the weights from which rollouts sample as `version`, and removes versions too old."""
        oldest = version - self._config.max_staleness
        # Old ones are removed first to save memory, because a version can be a whole model.
        self._forget_before(min(oldest, version - 1))
        source = self._parameters.values.data if self.sampling is None else self.sampling
        before, now = self.retained.get(version - 1), source.to(self.memory, self.dtype, copy=True)
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
        """Copies `version` of the policy, if it is retained, or the present EMA to host memory until `release`."""
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
        if self.renewed_reference is not None:
            return self.renewed_reference
        if self._config.lora.path is not None:
            # A warm start is the policy to stay close to, not the bare base model.
            return self._parameters.snapshot()
        # A version is never written to, so that this one stays what the run started at.
        return self.of(0) if needed and self._whole else None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Returns parts of a checkpoint: name of the part (retained, or as `_averages`) → name → CPU tensor."""
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
            version: self._parameters.pack(tensors, where=f"version {version}", dtype=self.dtype).to(self.memory)
            for version, tensors in sorted(by_version.items())
        }
        self._changed = None

    def _averages(self) -> dict[str, Tensor]:
        averages = {"ema": self.ema, "sampling": self.sampling, "average": self.average}
        averages["reference"] = self.renewed_reference
        return {name: flat for name, flat in averages.items() if flat is not None}

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return self._parameters.named(flat.to("cpu", copy=True))


class PublishedStreams:
    """The publishers of the policy and, with `trainer.ema_decay`, of its EMA.

    `stage` and `proof` run in the trainer's main thread. Calls to the publishers themselves run in another thread (the
    "publish" lane), at the same time as the next training step.
    """

    _sent_from: torch.device | None = None  # Device from which versions are sent; None: that of the versions.

    def __init__(self, config: Config, policy: PipelinePolicy, parameters: FlatParameters, versions: Versions) -> None:
        self._config, self._policy, self._parameters, self._versions = config, policy, parameters, versions
        self._tuning = tuning_of(config)
        self.policy: SealedVersions = self._new_publisher(POLICY)
        self.ema: SealedVersions | None = None if versions.ema is None else self._new_publisher(EMA)
        self.collective = CollectiveSender(self.policy, self._sent_from or versions.memory)

    def _new_publisher(self, stream: str) -> SealedVersions:
        return Publisher(
            self._parameters.named(self._parameters.values.data),
            stream,
            dtypes=self._versions.dtypes,
            alpha=self._tuning.alpha,
            rank=self._tuning.rank,
            retain=self._config.live_versions,
            memory=self._versions.memory,
        )

    def stage(self, version: int, stream: str = POLICY) -> None:
        """Copies a version for its delivery; the trainer waits only for this copy. ValueError if it is not here."""
        self._publisher(stream)
        if (flat := self._versions.sendable(stream, version)) is None:
            raise ValueError(f"version {version} of stream {stream} is not here to be published")
        self._stage(stream, version, flat)

    def proof(self) -> dict[str, Tensor]:
        """Stages the proof weights, random ones, as version PROOF_VERSION; returns the probe of this rank's network.

        Rollout workers must give the same probe for it. The probe of version 0 would prove nothing: it is equal to that
        of the model as it was loaded.
        """
        flat = self._proof()
        self._stage(POLICY, PROOF_VERSION, flat)
        with self._parameters.swapped(flat):
            return self._tuning.probe(self._policy.transformer)

    def proof_again(self) -> tuple[Header, ByteArray]:
        """Header and bytes of the proof weights, if those that were sent are lost with their node. For any rank."""
        layout = self.policy.layout
        data = layout.packed(proof_tensors(layout, derive(self._config.seed, "proof")))
        return self.policy.draft(PROOF_VERSION).sealed(layout.digests(data)), data

    def clear(self) -> None:
        for publisher in filter(None, (self.policy, self.ema)):
            publisher.clear()

    def _publisher(self, stream: str) -> SealedVersions:
        if stream == POLICY:
            return self.policy
        if stream != EMA or self.ema is None:
            raise ValueError(f"no stream {stream!r} here, only {POLICY if self.ema is None else f'{POLICY}, {EMA}'}")
        return self.ema

    def _proof(self) -> Tensor:
        tensors = proof_tensors(self.policy.layout, derive(self._config.seed, "proof"))
        return self._parameters.pack(tensors, where="proof", dtype=self._versions.dtype)

    def _stage(self, stream: str, version: int, flat: Tensor) -> None:
        named = self._parameters.named(flat.to(self._versions.memory))
        cast("Publisher", self._publisher(stream)).stage(version, named, deadline=self._config.deadlines.publish)


class GatheredStreams(PublishedStreams):
    """As PublishedStreams, on every rank; the first one gathers a version from all of them and sends it.

    All ranks must make the same calls of `proof`, `gather` and `recall` in the same order, one at a time. `gather`
    runs in the "publish" lane, the others between two calls to train.
    """

    _sent_from = torch.device("cpu")

    def __init__(
        self, config: Config, policy: PipelinePolicy, parameters: ShardedParameters, versions: Versions
    ) -> None:
        self._sharded = parameters
        whole = {name: torch.empty(shape, device="meta") for name, shape in parameters.wholes.items()}
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.deadlines.publish))
        self._gather = Gather(
            Layout.of(whole, versions.dtypes),
            group,
            bucket_bytes=config.checkpoint_engine.bucket_bytes,
            alignment=ALIGN_ELEMENTS * versions.dtype.itemsize,
        )
        self._shares: dict[tuple[str, int], Share] = {}  # Versions that are staged and not gathered.
        super().__init__(config, policy, parameters, versions)

    def _new_publisher(self, stream: str) -> GatheredVersions:
        return GatheredVersions(self._gather, stream)

    def gather(self, version: int, stream: str = POLICY) -> Header | None:
        """Gathers a staged version; returns its header on the first rank. Raises VersionGone, or as `Gather.take`."""
        share = self._shares.pop((stream, version), None)
        if share is None:
            raise VersionGone(f"version {version} of stream {stream} is not staged")
        return cast("GatheredVersions", self._publisher(stream)).gather(version, share)

    def recall(self, version: int, stream: str = POLICY) -> tuple[Header | None, ByteArray | None]:
        """Gathers again a version that was sent; returns header and bytes on the first rank. Raises as `gather`."""
        flat = self._versions.sendable(stream, version)
        if flat is None:
            raise VersionGone(f"version {version} of stream {stream} is not kept any more")
        return cast("GatheredVersions", self._publisher(stream)).recall(version, self._share(flat))

    def proof(self) -> dict[str, Tensor]:
        """Stages this rank's rows; the probe is equal on all ranks, which gather one tensor after the other."""
        flat = self._proof()
        self._shares[POLICY, PROOF_VERSION] = self._share(flat)
        live = tuning_of(self._config).parameters(self._policy.transformer)
        probe: dict[str, Tensor] = {}
        with self._parameters.swapped(flat):
            for name, dtype in sorted(self._versions.dtypes.items()):
                probe |= tensor_probe({name: self._sharded.gathered(live[name]).to(dtype)})
        return probe

    def clear(self) -> None:
        super().clear()
        self._shares.clear()

    def _stage(self, stream: str, version: int, flat: Tensor) -> None:
        self._shares[stream, version] = self._share(flat)

    def _share(self, flat: Tensor) -> Share:
        flat = flat.to(self._versions.dtype)  # An average is kept in float32, in host memory.
        return self._gather.share(flat)

    def _proof(self) -> Tensor:
        """One whole tensor at a time is drawn, so that its values don't depend on the number of ranks."""
        seed, world = derive(self._config.seed, "proof"), self._sharded.world
        rows = {}
        for entry in self.policy.layout.entries:
            whole = proof_tensors(Layout((entry,), entry.nbytes), seed)[entry.name]
            own = shard_rows(entry.shape[0], world.size, world.rank)
            rows[entry.name] = whole[own.start : own.stop].to(dtype_of(entry))
        return self._parameters.pack(rows, where="proof", dtype=self._versions.dtype)
