"""Trust region: the distance an optimizer step moved the policy, measured after it; a step that is too long is cut.

With one optimizer step per batch every ratio is 1, so no clip binds, and Adam's step hardly depends on how large or how
consistent the gradient is. What bounds the distance between consecutive policies has to look at the step itself. Here
that is the Gaussian KL between the denoising steps of the policies before and after it, in closed form; a step beyond
`algorithm.max_kl_per_update` is scaled down by a line search (TRPO, arXiv 1502.05477, appendix C, with the exact
divergence in place of its second-order estimate).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from async_flowrl.algorithms.base import Diverges, MicroBatch, Prediction
from async_flowrl.algorithms.policy_gradient import MIN_GAUSSIAN_STD
from async_flowrl.algorithms.sde import expand
from async_flowrl.seeds import derive
from async_flowrl.training.forward_passes import ForwardPasses, UpdateInputs, first_rows
from async_flowrl.training.micro_batches import Group

ByStep = dict[int, float]
"""Nats per image by the index of the denoising step."""
MEASURED_EVERY = 10
"""Optimizer steps between measurements where there is no limit; with one, every step is measured."""
SHARPEST = MIN_GAUSSIAN_STD
"""Steps whose noise would have a smaller standard deviation are left out: their density means nothing (`cps`)."""
SEARCHES = 4
"""Scalings of one step; the second is rarely needed, because the KL is nearly quadratic in the step."""
NOT_FINITE = 0.1
"""Share that is kept of a step so long that its KL overflows."""
AIM = 0.95
"""Share of the allowed KL that a scaling aims at, so that the next measurement is within it."""


@dataclass(frozen=True)
class Probe:
    """Rows of one denoising step, and what was predicted for them before the optimizer step."""

    group: Group
    step: int
    batch: MicroBatch
    before: Prediction


class TrustRegion:
    """Measures and bounds each optimizer step; every rank measures the same rows, so all find the same numbers.

    The first `algorithm.kl_probe_images` images (a micro-batch at most) of the lowest trained group are measured at
    every denoising step but the last: those of the window at the recorded latents, the others as if they had noise,
    too, at latents noised anew from the clean image that the last trained step predicts. The steps share their weights,
    so an update that moves the trained ones little can ruin the rest.
    """

    def __init__(self, inputs: UpdateInputs, passes: ForwardPasses) -> None:
        self._inputs, self._passes = inputs, passes
        self._images = inputs.config.algorithm.kl_probe_images if isinstance(inputs.algorithm, Diverges) else 0
        self._limit = inputs.config.algorithm.max_kl_per_update
        self._kept: tuple[Group, list[MicroBatch]] | None = None
        self._probes: list[Probe] = []

    def begin(self) -> None:
        self._kept, self._probes = None, []

    @property
    def due(self) -> bool:
        """Whether the next optimizer step is to be measured."""
        return self._images > 0 and (self._limit is not None or self._inputs.optimizer.steps % MEASURED_EVERY == 0)

    def remember(self, group: Group, batches: list[MicroBatch]) -> None:
        """Keeps the first images of the group, where this step is measured; what was kept before is let go."""
        if batches:
            by_step = [batch for whole in batches for batch in _by_step(whole, self._images)]
            self._kept = group, by_step[: len(group.train_steps)]

    @property
    def measures(self) -> bool:
        """Whether the step that is being accumulated is measured."""
        return self._kept is not None

    def prepare(self) -> None:
        """Before the optimizer steps: predicts under the live weights."""
        assert self._kept is not None
        group, trained = self._kept
        rows = trained + self._untrained(group, trained)
        predictions = self._passes.predict(group, rows)
        stds = torch.stack([prediction["std"][0] for prediction in predictions]).tolist()
        self._probes = [
            Probe(group, int(batch.steps[0]), batch, before)
            for batch, before, std in zip(rows, predictions, stds, strict=True)
            if std >= SHARPEST
        ]

    def _untrained(self, group: Group, trained: list[MicroBatch]) -> list[MicroBatch]:
        """The same images at the steps that were not trained, with named noise."""
        last = trained[-1]
        others = set(range(len(last.sigmas) - 2)) - {int(batch.steps[0]) for batch in trained}
        if not others:
            return []
        clean = self._passes.clean(group, last)
        return [_noised(last, clean, step, group.meta.seeds[0]) for step in sorted(others)]

    def bound(self, before: Tensor) -> dict[str, float]:
        """After the optimizer stepped from the flat weights `before`: measures, and scales the step where it must be.

        Returns `kl_per_update` (nats per image), its part of each denoising step `kl_per_update/<step>`, and with a
        limit `trust_region/raw_kl` of the step as the optimizer took it and `trust_region/scale`, the share kept.
        """
        if not self._probes:
            return {}  # every step's noise is too sharp
        found = self._measure()
        if self._limit is None:
            return _named(found)
        raw = sum(found.values())
        parameters = self._inputs.parameters
        room = parameters.gradients  # which a step has no more use for
        found, scale = shorten(parameters.values.data, before, found, self._measure, self._limit, room=room)
        return {**_named(found), "trust_region/raw_kl": raw, "trust_region/scale": scale}

    def _measure(self) -> ByStep:
        """Nats per image by denoising step, means over the probed images."""
        assert isinstance(self._inputs.algorithm, Diverges)
        self._inputs.parameters.changed()  # a scaling wrote into the masters
        means = {}
        for probe in sorted(self._probes, key=lambda probe: probe.step):
            (after,) = self._passes.predict(probe.group, [probe.batch])
            means[probe.step] = self._inputs.algorithm.moved(probe.batch, probe.before, after).mean()
        return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))


def _by_step(batch: MicroBatch, images: int) -> list[MicroBatch]:
    """The first `images` images of a micro-batch, each denoising step by itself; a step's rows are adjacent."""
    steps = len(set(batch.steps.tolist()))
    size = len(batch.sigma) // steps
    return [first_rows(batch, min(size, images), start=place * size) for place in range(steps)]


def _noised(like: MicroBatch, clean: Tensor, step: int, seed: int) -> MicroBatch:
    """`clean` [B, ...] brought to the level of `step`; no transition was recorded: `next_latents` mean nothing."""
    generator = torch.Generator().manual_seed(derive(seed, "kl", step))
    noise = torch.randn(clean.shape, generator=generator, dtype=torch.float32).to(clean.device)
    sigma, after = (like.sigmas[place].expand(len(clean)) for place in (step, step + 1))
    latents = expand(1.0 - sigma, clean) * clean + expand(sigma, clean) * noise
    steps = torch.full_like(like.steps, step)
    return replace(like, latents=latents, next_latents=latents, sigma=sigma, sigma_next=after, steps=steps)


def shorten(
    values: Tensor,
    before: Tensor,
    found: ByStep,
    measure: Callable[[], ByStep],
    limit: float,
    *,
    room: Tensor | None = None,
) -> tuple[ByStep, float]:
    """Scales the step from `before` to `values`, in place, until its summed KL is at most `limit`.

    `found` is what `measure` says of the whole step. Returns what it says of the scaled one, and the share kept. Every
    number comes from measurements that are equal on all ranks, so all take the same step. A step that stays beyond the
    limit after four scalings, or whose KL is not a number even then, is taken back. `room` takes the whole step.
    """
    full, scale = torch.sub(values, before, out=room), 1.0
    for _ in range(SEARCHES):
        kl = sum(found.values())
        if kl <= limit:
            return found, scale
        scale *= math.sqrt(AIM * limit / kl) if math.isfinite(kl) else NOT_FINITE
        torch.add(before, full, alpha=scale, out=values)
        found = measure()
    if sum(found.values()) <= limit:
        return found, scale
    values.copy_(before)
    return measure(), 0.0


def _named(by_step: ByStep) -> dict[str, float]:
    return {"kl_per_update": sum(by_step.values())} | {f"kl_per_update/{step}": kl for step, kl in by_step.items()}
