"""The interface of an algorithm: advantages on the controller, `predict` and `loss` in the trainer. Pure functions.

The trainer calls `predict` up to four times per micro-batch, always with the same shapes, grad mode and code path, so
that equal weights give bit-equal results. Predictions are float64 where they are sums over latents, float32 elsewhere:

    current    the live adapter, with gradients
    proximal   the adapter at the start of the batch (None on the first optimizer step: the loss detaches `current`)
    behaviour  the retained adapter of the version that generated the sample (None unless `needs_behaviour`)
    reference  the base model, adapter off (None unless `needs_reference`)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

Velocity = Callable[[Tensor, Tensor], Tensor]
"""(latents [B, ...] float32, sigma [B] float32) -> guided velocity [B, ...] float32 under the adapter now active."""


class Prediction(TypedDict, total=False):
    """What `predict` returns: those of these tensors that the algorithm names in `predicts`.

    The batch dimension is first in all of them. An algorithm of your own that needs others returns a subclass.
    """

    log_prob: Tensor
    """[B] float64, of the recorded step under the weights now active, mean over latent elements."""
    mean: Tensor
    """[B, ...] float32, of the distribution of the next latents."""
    std: Tensor
    """[B] float32, the full standard deviation of the step."""
    velocity: Tensor
    """[B, ...] float32, guided, at `noised`."""
    noised: Tensor
    """[B, ...] float32, final latents noised anew to the row's own level."""
    error: Tensor
    """[B] float64, flow-matching loss of the row."""


def detached(prediction: Prediction) -> Prediction:
    """The same numbers without gradient."""
    named: dict[str, Tensor] = dict(cast("Any", prediction))
    return cast("Prediction", {name: value.detach() for name, value in named.items()})


def rows_of(prediction: Prediction) -> int:
    """B."""
    named: dict[str, Tensor] = dict(cast("Any", prediction))
    return len(next(iter(named.values())))


@dataclass(frozen=True)
class MicroBatch:
    """B = samples x steps rows, all of one group.

    Rows of policy-gradient algorithms are recorded transitions latents → next_latents at step index `steps`.
    Algorithms that train on final images (`records = "final"`) get latents = next_latents = the final latents.
    """

    latents: Tensor
    """[B, ...] float32, x at sigma."""
    next_latents: Tensor
    """[B, ...] float32, x' at sigma_next."""
    sigma: Tensor
    """[B] float32."""
    sigma_next: Tensor
    """[B] float32."""
    steps: Tensor
    """[B] int64, index of the denoising step in the schedule; in host memory, so that asking waits for no device."""
    sigmas: Tensor
    """[T+1] float32, the whole schedule."""
    advantages: Tensor
    """[B] float32."""
    positive: tuple[bool, ...]
    """[B] whether the row's advantage is above 0; in host memory."""
    rollout_log_prob: Tensor
    """[B] float32, mean over latent elements, computed by the sampler; zeros for records = "final"."""
    seeds: tuple[int, ...]
    """[B] a named seed per row, for algorithms that draw in the trainer."""
    age: int
    """Policy versions between the sampler and the trainer."""


@dataclass(frozen=True)
class LossOutput:
    """`loss` [B] float32 per row, not yet averaged (the trainer divides by the full batch's count of rows);
    `metrics` per row [B], averaged over the same rows in float64 for the log."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    """Among them `kept` and `nonzero` (0 or 1): `gradient_kept` is the ratio of their sums."""


class Algorithm(Protocol):
    name: str
    records: str
    """"transitions" or "final": what the rollout must record."""
    needs_behaviour: bool
    needs_reference: bool
    vanishes_at_zero: bool
    """Whether a sample with advantage 0 has zero gradient (so that groups of equal rewards may be skipped)."""
    predicts: Collection[str]
    """Keys of what `predict` returns, see `Prediction`."""
    reads: Collection[str]
    """Keys of predictions that `loss` and `moved` look at, as configured. One that is not predicted is refused."""
    group_local: bool
    """Whether advantages need only the sample's own group (streaming hand-over needs this)."""

    def advantages(
        self,
        rewards: Mapping[str, Sequence[npt.NDArray[np.float64]]],
        *,
        weights: Mapping[str, float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[npt.NDArray[np.float64]]:
        """Per reward name, the list of the groups' raw rewards [n]; returns one advantage array [n] per group.

        `weights` per reward name (1 if None); `seeds`, one per group, are needed by `permute_advantages` alone.
        """
        ...

    def select(self, advantages: npt.NDArray[np.float64]) -> list[int]:
        """Which samples of a group are trained, in order (all of them, but for pairwise losses)."""
        ...

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction: ...

    def loss(
        self,
        batch: MicroBatch,
        current: Prediction,
        proximal: Prediction | None,
        behaviour: Prediction | None,
        reference: Prediction | None,
    ) -> LossOutput: ...


@runtime_checkable
class Diverges(Protocol):
    """An algorithm that can say how far two of its predictions are apart."""

    def moved(self, batch: MicroBatch, before: Prediction, after: Prediction) -> Tensor:
        """[B] float64, nats of the whole latent: KL of the denoising step as predicted `before` to that of `after`."""
        ...
