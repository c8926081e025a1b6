"""The interface of a rollout engine, a plain object that turns requests into images and trajectories."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from async_flowrl.types import ByteArray, Conditioning, RolloutRequest, Span, Trajectory, Wording
from checkpoint_engine import Activation, Header

Export = Callable[[], tuple[Header, ByteArray]]
"""Header and bytes of a version that the worker's receiver holds."""


@dataclass(frozen=True)
class Rollout:
    """images uint8 [n, H, W, 3]; no trajectory for evaluation requests."""

    images: ByteArray
    trajectory: Trajectory | None
    spans: tuple[Span, ...]


class RolloutEngine(Protocol):
    """Runs without Ray. Its caller receives the weights, verifies them and says which version is to be used."""

    def encode(self, texts: Sequence[Wording]) -> list[Conditioning]:
        """Embeddings of negative prompts, for the trainer, once per run."""
        ...

    def generate(self, request: RolloutRequest) -> Rollout:
        """Denoises the request's images in fixed chunks and decodes them."""
        ...

    def live_tensors(self) -> Mapping[str, Tensor]:
        """The trained tensors by layout name, for the receiver to turn into views of its flat buffer."""
        ...

    def adopt(self, active: Activation, export: Export) -> None:
        """The receiver has just put `active` into `live_tensors`; from here on the network must compute with it.

        An engine whose network doesn't compute with those tensors themselves takes the bytes from `export`.
        """
        ...

    def probe(self) -> Mapping[str, Tensor]:
        """What the network computes with since the version adopted last, by the network's own names: see
        `checkpoint_engine.binding_proof`."""
        ...
