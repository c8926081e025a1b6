"""Sending end of the weights, on the first trainer rank: streams, canary and binding proof."""

from collections.abc import Mapping

from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.observability.delays import debug_delay
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import lora_layers, lora_modules
from async_flowrl.seeds import derive
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.versions import Versions
from async_flowrl.types import EMA, POLICY, ByteArray
from checkpoint_engine import CANARY_VERSION, Draft, Header, LoraModule, Publisher, binding_probe, canary_tensors
from checkpoint_engine.ends import SendingEnd


class PublishedStreams:
    """The policy and, where the run has one, its EMA.

    `stage` and `canary` belong to the main lane; everything else runs beside the next update, on the "publish" lane.
    """

    def __init__(self, config: Config, policy: Policy, parameters: FlatParameters, versions: Versions) -> None:
        self._config, self._policy, self._parameters, self._versions = config, policy, parameters, versions
        streams = [POLICY] if versions.ema is None else [POLICY, EMA]
        self._publishers = {
            stream: Publisher(
                parameters.named(parameters.values.data),
                stream,
                alpha=config.lora.alpha,
                rank=config.lora.rank,
                retain=config.live_versions,
            )
            for stream in streams
        }
        self.collective = SendingEnd(self._publishers[POLICY], parameters.values.device)

    def stage(self, version: int, stream: str = POLICY) -> None:
        """Copies a retained version away: all of its delivery that the trainer waits for."""
        publisher = self._publisher(stream)
        deadline = self._config.deadlines.publish
        if stream == EMA:
            if version != self._versions.newest or self._versions.ema is None:
                raise ValueError(f"only the newest EMA can be published ({self._versions.newest}), asked for {version}")
            publisher.stage(version, self._parameters.named(self._versions.ema), deadline=deadline)
        else:
            publisher.stage(version, self._parameters.named(self._versions.of(version)), deadline=deadline)

    def canary(self) -> dict[str, Tensor]:
        """Stages random A and B as version -1 and returns what this rank's modules compute with them.

        B is zero in version 0, so that version's own probe would prove nothing.
        """
        publisher = self._publisher(POLICY)
        tensors = canary_tensors(publisher.layout, derive(self._config.seed, "canary"))
        flat = self._parameters.pack(tensors, where="canary")
        publisher.stage(CANARY_VERSION, self._parameters.named(flat), deadline=self._config.deadlines.publish)
        with self._parameters.swapped(flat):
            return binding_probe(self._modules())

    def seal(self, version: int, stream: str = POLICY) -> Header:
        """Digests a staged version, beside the next update."""
        debug_delay(self._config.debug.delays, "publish", self._config.seed, "publish", version)
        publisher = self._publisher(stream)
        header = publisher.seal(version)
        if self._config.debug.freeze_publish and stream == POLICY and version == 0:
            publisher.hold(0)
        return header

    def draft(self, version: int, stream: str = POLICY) -> Draft:
        """The header of a version that is staged, digests aside."""
        return self._publisher(stream).draft(version)

    def payload(self, version: int, stream: str = POLICY) -> tuple[Header, ByteArray]:
        """Header and bytes of a sealed version, uint8 [nbytes]."""
        header, data = self._publisher(stream).payload(version)
        if self._config.debug.freeze_publish and stream == POLICY and version > 0:
            return header, self._publisher(stream).payload(0)[1]
        return header, data

    def hold(self, version: int, stream: str = POLICY) -> None:
        """Retains a sealed version beyond its place among the newest, until `release`."""
        self._publisher(stream).hold(version)

    def release(self, version: int, stream: str = POLICY) -> None:
        self._publisher(stream).release(version)

    def clear(self) -> None:
        """Forgets what was published, so that a restored run can publish its versions again."""
        for publisher in self._publishers.values():
            publisher.clear()

    def _modules(self) -> Mapping[str, LoraModule]:
        layers = lora_layers(lora_modules(self._policy.transformer))
        return {name: LoraModule(*parts) for name, parts in layers.items()}

    def _publisher(self, stream: str) -> Publisher:
        if stream not in self._publishers:
            raise ValueError(f"no stream {stream!r} here, only {', '.join(self._publishers)}")
        return self._publishers[stream]
