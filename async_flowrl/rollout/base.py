"""The interface of a rollout engine, which makes images and trajectories from requests; it does not know Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from async_flowrl.types import ByteArray, Conditioning, EncoderInput, RolloutRequest, Span, Trajectory
from checkpoint_engine import Activation, Header

# Function that returns the header and the bytes of a version from the worker's receiver of weights.
Export = Callable[[], tuple[Header, ByteArray]]


@dataclass(frozen=True)
class Rollout:
    """The result of one request."""

    images: ByteArray  # uint8 [n, H, W, 3].
    trajectory: Trajectory | None  # None for evaluation requests.
    spans: tuple[Span, ...]  # Parts of the time that it took, for reports; of a batch, the first has them.


class RolloutEngine(Protocol):
    """Makes images. The rollout worker receives the weights, verifies them, and tells the engine what to use."""

    def encode(self, texts: Sequence[EncoderInput]) -> list[Conditioning]:
        """Returns the conditioning of negative prompts, which the trainer needs; called once per run."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Returns images and, for training requests, trajectories of one batch, by the version that is active."""

    def live_tensors(self) -> Mapping[str, Tensor]:
        """Returns the trained tensors by layout name; the receiver makes them views of its own flat buffer."""

    def adopt(self, active: Activation, export: Export) -> None:
        """Makes the network use the version `active`, which the receiver has just written to `live_tensors`.

        An engine whose network uses these tensors themselves does nothing; any other takes the bytes from `export`.
        """

    def probe(self) -> Mapping[str, Tensor]:
        """Returns a probe of the tensors that the network uses now (see `checkpoint_engine.binding_proof`)."""
