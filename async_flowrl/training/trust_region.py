"""The trust region: measures how far an optimizer step moved the policy, and shortens a step that is too long.

The step itself is measured after it was made, by the exact Gaussian KL between the denoising steps before and after it.
A step above `algorithm.max_kl_per_update` is scaled down by a line search (TRPO, arXiv 1502.05477, appendix C, but with
the exact divergence instead of its second-order estimate).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.policy_gradient import MIN_GAUSSIAN_STD
from async_flowrl.algorithms.sde import expand
from async_flowrl.seeds import derive
from async_flowrl.training.forward_passes import ForwardPasses, UpdateInputs, copied, first_rows
from async_flowrl.training.parts import Group

ByStep = dict[int, float]  # Index of a denoising step → KL in nats per image.


# The group whose rows are measured, and its rows, one micro-batch for each trained denoising step.
ProbeRows = tuple[Group, list[MicroBatch]]


# Optimizer steps from one measurement of the KL to the next; with a limit on the KL, every step is measured.
MEASURED_EVERY_STEPS = 10


# Denoising steps with a smaller standard deviation of the noise are not measured, because their density is useless.
SHARPEST = MIN_GAUSSIAN_STD


# Largest number of scalings of one step; one is usually enough, because the KL is nearly quadratic in the step.
MAX_SCALINGS = 4


NOT_FINITE_FACTOR = 0.1  # Factor by which a step is scaled if its KL is not finite.


AIM_SHARE = 0.95  # A scaling aims at this share of the allowed KL, so that the next measurement is below the limit.


class TrustRegion:
    """Measures and limits optimizer steps, with the same numbers on every rank: `begin`, `remember`, `prepare`,
    `bound`.

    It uses the first `algorithm.kl_probe_images` images of the trained group with the lowest number, at every denoising
    step whose noise has a standard deviation of SHARPEST or more: trained steps at the recorded latents, others as if
    they had noise, at latents made by noising the clean image that the last trained step predicts.
    """

    def __init__(self, inputs: UpdateInputs, passes: ForwardPasses) -> None:
        self._inputs, self._passes = inputs, passes
        self._images = inputs.config.algorithm.kl_probe_images if hasattr(inputs.algorithm, "moved") else 0
        self._limit = inputs.config.algorithm.max_kl_per_update
        self._kept: ProbeRows | None = None
        # Rows of each measured denoising step, with their predictions before the optimizer step.
        self._probes: list[tuple[MicroBatch, Prediction]] = []

    def begin(self) -> None:
        self._kept, self._probes = None, []

    @property
    def due(self) -> bool:
        return self._images > 0 and (
            self._limit is not None or self._inputs.optimizer.steps % MEASURED_EVERY_STEPS == 0
        )

    def remember(self, group: Group, batches: list[MicroBatch]) -> None:
        """Keeps the first images of the group for the measurement, instead of those kept before."""
        if batches:
            by_step = [batch for whole in batches for batch in _by_step(whole, self._images)]
            self._kept = group, by_step[: len(group.train_steps)]

    @property
    def measures(self) -> bool:
        return self._kept is not None

    def prepare(self) -> None:
        assert self._kept is not None
        group, trained = self._kept
        rows = trained + self._untrained(group, trained)
        predictions = self._passes.predict(group, rows)
        stds = torch.stack([prediction["std"][0] for prediction in predictions]).tolist()
        probes = zip(rows, predictions, stds, strict=True)
        self._probes = [(batch, before) for batch, before, std in probes if std >= SHARPEST]

    def _untrained(self, group: Group, trained: list[MicroBatch]) -> list[MicroBatch]:
        """Returns micro-batches of the same images at the steps that are not trained; their noise has fixed seeds."""
        last = trained[-1]
        others = set(range(len(last.sigmas) - 2)) - {int(batch.steps[0]) for batch in trained}
        if not others:
            return []
        clean = self._passes.clean(group, last)
        return [_noised(last, clean, step, group.meta.seeds[0]) for step in sorted(others)]

    def bound(self, before: Tensor) -> dict[str, float]:
        """Measures the step from the flat weights `before` to the present ones, and shortens it if needed.

        Returns `kl_per_update` (nats per image), its parts by denoising step, and with a limit `trust_region/raw_kl`
        and `/scale`.
        """
        if not self._probes:
            return {}  # the noise of every denoising step is too small
        kl_by_step = self._measure()
        if self._limit is None:
            return _named(kl_by_step)
        raw = sum(kl_by_step.values())
        parameters = self._inputs.parameters
        room = parameters.gradients  # no longer needed
        kl_by_step, scale = shorten(parameters.values.data, before, kl_by_step, self._measure, self._limit, room=room)
        return {**_named(kl_by_step), "trust_region/raw_kl": raw, "trust_region/scale": scale}

    def _measure(self) -> ByStep:
        self._inputs.parameters.changed()  # a scaling has changed the weights
        assert self._kept is not None
        group, means = self._kept[0], {}
        for batch, before in sorted(self._probes, key=lambda probe: int(probe[0].steps[0])):
            (after,) = self._passes.predict(group, [batch])
            means[int(batch.steps[0])] = cast("Any", self._inputs.algorithm).moved(batch, before, after).mean()
        return dict(zip(means, torch.stack(list(means.values())).tolist(), strict=True))


def _by_step(batch: MicroBatch, images: int) -> list[MicroBatch]:
    steps = len(set(batch.steps.tolist()))
    size = len(batch.sigma) // steps
    return [copied(first_rows(batch, min(size, images), start=step * size)) for step in range(steps)]


def _noised(like: MicroBatch, clean: Tensor, step: int, seed: int) -> MicroBatch:
    """Returns a micro-batch of `clean` [B, ...] noised to the level of `step`; its `next_latents` have no meaning."""
    generator = torch.Generator().manual_seed(derive(seed, "kl", step))
    noise = torch.randn(clean.shape, generator=generator, dtype=torch.float32).to(clean.device)
    sigma, after = (like.sigmas[index].expand(len(clean)) for index in (step, step + 1))
    latents = expand(1.0 - sigma, clean) * clean + expand(sigma, clean) * noise
    steps = torch.full_like(like.steps, step)
    return replace(like, latents=latents, next_latents=latents, sigma=sigma, sigma_next=after, steps=steps)


def shorten(
    values: Tensor,
    before: Tensor,
    kl_by_step: ByStep,
    measure: Callable[[], ByStep],
    limit: float,
    *,
    room: Tensor | None = None,
) -> tuple[ByStep, float]:
    """Scales the step from `before` to `values`, in place, until the sum of its KL is at most `limit` (nats per image).

    `kl_by_step` is the result of `measure` for the whole step; `room` is memory of the size of `values`, or None.
    Returns the result for the scaled step, and the share that is kept. If MAX_SCALINGS are not enough, or the KL stays
    infinite or NaN, the step is undone.
    """
    full, scale = torch.sub(values, before, out=room), 1.0
    for _ in range(MAX_SCALINGS):
        kl = sum(kl_by_step.values())
        if kl <= limit:
            return kl_by_step, scale
        scale *= math.sqrt(AIM_SHARE * limit / kl) if math.isfinite(kl) else NOT_FINITE_FACTOR
        torch.add(before, full, alpha=scale, out=values)
        kl_by_step = measure()
    if sum(kl_by_step.values()) <= limit:
        return kl_by_step, scale
    values.copy_(before)
    return measure(), 0.0


def _named(by_step: ByStep) -> dict[str, float]:
    return {"kl_per_update": sum(by_step.values())} | {f"kl_per_update/{step}": kl for step, kl in by_step.items()}
