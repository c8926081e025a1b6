"""Forward passes of a group under other weights than the live ones, and the pass that is trained.

    proximal    before the first step of a batch, for the groups of its later steps: the weights the batch began with
    behaviour   the retained weights of the version that sampled the group
    reference   the adapter off (or at the warm start's values)
    current     the live weights; the only pass that is followed by a backward pass

All run with the same shapes, grad mode and code path, so equal weights give equal bits.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from async_flowrl.algorithms.base import Algorithm, LossOutput, MicroBatch, Prediction, Velocity
from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import reference_mode
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.fsdp import World
from async_flowrl.training.messages import StepPlan
from async_flowrl.training.micro_batches import Group, to_device
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.training.update_metrics import Tally
from async_flowrl.types import Conditioning, Wording

PROBED_ROWS = 4
"""Rows whose log-probs are recomputed under the sampling weights in every batch, only to compare two engines."""


@dataclass
class Parts:
    """What an update works on."""

    config: Config
    policy: Policy
    algorithm: Algorithm
    parameters: FlatParameters
    optimizer: Optimizer
    world: World
    device: torch.device
    sampled_by: Callable[[int], Tensor]
    """Version → the flat weights that rollouts sampled from under that name."""
    averaged: bool
    """Rollouts sample from a moving average, so even a sample of age 0 is not from the live weights."""
    reference: Tensor | None
    """Flat weights of the KL reference; None = the adapter off."""


@dataclass(frozen=True)
class Anchors:
    """A group's predictions without gradient, one per micro-batch; None where there are none."""

    proximal: list[Prediction] | None
    behaviour: list[Prediction] | None
    reference: list[Prediction] | None
    on_policy: bool
    """The live weights are the ones that sampled the group: its behaviour predictions are `current` itself."""


class Passes:
    """Makes predictions; keeps those of the proximal phase until their optimizer step has used them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._negatives: dict[Wording, dict[str, Tensor]] = {}
        self._proximal: dict[int, list[Prediction]] = {}

    def set_negatives(self, conditionings: Mapping[Wording, Conditioning]) -> None:
        self._negatives = {text: to_device(value, self._parts.device) for text, value in conditionings.items()}

    def batches(self, group: Group) -> list[MicroBatch]:
        """This rank's micro-batches of the group, in the order they are trained."""
        parts, trainer = self._parts, self._parts.config.trainer
        return list(
            group.micro_batches(
                parts.algorithm.records,
                rank=parts.world.rank,
                world=parts.world.size,
                samples=trainer.micro_batch_size,
                steps=trainer.timesteps_per_forward or len(group.train_steps),
            )
        )

    def remember_proximal(self, group: Group, tally: Tally) -> None:
        """Predicts under the live weights, for a later optimizer step of this batch."""
        with tally.span("proximal"):
            self._proximal[group.meta.group] = self._predict(group, self.batches(group))

    def forget_proximal(self) -> None:
        self._proximal.clear()

    def anchors(self, group: Group, batches: Sequence[MicroBatch], plan: StepPlan, tally: Tally) -> Anchors:
        """Every prediction of the group but the trained one. Raises ValueError where a needed one cannot be had."""
        parts, meta = self._parts, group.meta
        proximal = None
        if plan.update > 0:
            if meta.group not in self._proximal:
                raise ValueError(
                    f"group {meta.group} has no proximal predictions for update {plan.update} of the batch"
                )
            proximal = self._proximal.pop(meta.group)
        fresh = meta.age == 0 and not parts.averaged
        behaviour = proximal if fresh else None
        if not fresh and (wanted := self._behaviour_batches(batches, plan, tally)):
            with tally.span("behaviour"), parts.parameters.swapped(parts.sampled_by(meta.version)):
                behaviour = self._predict(group, wanted)
        reference = None
        if parts.algorithm.needs_reference:
            with tally.span("reference"), self._reference():
                reference = self._predict(group, batches)
        return Anchors(proximal, behaviour, reference, on_policy=fresh and plan.update == 0)

    def train(
        self, group: Group, index: int, batch: MicroBatch, anchors: Anchors
    ) -> tuple[LossOutput, Prediction | None]:
        """The loss with its graph, and what the sampling weights predict (None if that was not computed)."""
        parts = self._parts
        current = parts.algorithm.predict(batch, self._velocity(group))
        behaviour = _at(anchors.behaviour, index)
        if anchors.on_policy:
            behaviour = _detached(current)
        output = parts.algorithm.loss(
            batch,
            current,
            _at(anchors.proximal, index),
            behaviour if parts.algorithm.needs_behaviour else None,
            _at(anchors.reference, index),
        )
        return output, behaviour

    def behaviour_gap(self, batch: MicroBatch, behaviour: Prediction) -> Tensor | None:
        """Mean |log-prob under the sampling weights - log-prob the rollout reported|: what two engines disagree by."""
        rows = len(next(iter(behaviour.values())))
        metrics = self._parts.algorithm.loss(first_rows(batch, rows), behaviour, None, None, None).metrics
        return metrics["log_prob_gap"].double().mean() if "log_prob_gap" in metrics else None

    def probing(self, plan: StepPlan, tally: Tally) -> bool:
        """One micro-batch per batch is compared with the rollout's log-probs."""
        first = plan.update == 0 and not tally.groups
        return plan.probe and first and self._parts.algorithm.records == "transitions"

    def _behaviour_batches(self, batches: Sequence[MicroBatch], plan: StepPlan, tally: Tally) -> list[MicroBatch]:
        """What is predicted under the sampling weights: all that the loss needs, else a few rows to probe."""
        if self._parts.algorithm.needs_behaviour:
            return list(batches)
        return [first_rows(batch, PROBED_ROWS) for batch in batches[:1]] if self.probing(plan, tally) else []

    def _reference(self) -> AbstractContextManager[None]:
        parts = self._parts
        if parts.reference is None:
            return reference_mode(parts.policy.transformer)
        return parts.parameters.swapped(parts.reference)

    def _predict(self, group: Group, batches: Sequence[MicroBatch]) -> list[Prediction]:
        """With gradients enabled and then detached: another grad mode may take other kernels."""
        velocity = self._velocity(group)
        return [_detached(self._parts.algorithm.predict(batch, velocity)) for batch in batches]

    def _velocity(self, group: Group) -> Velocity:
        policy, meta = self._parts.policy, group.meta
        negative = None
        if meta.sampling.true_cfg_scale > 1:
            if meta.negative not in self._negatives:
                raise ValueError(f"the conditioning of negative prompt {meta.negative!r} was not set")
            negative = self._negatives[meta.negative]
        return lambda latents, sigma: policy.velocity(latents, sigma, group.conditioning, negative, meta.sampling)


def first_rows(batch: MicroBatch, count: int) -> MicroBatch:
    """The first `count` rows of a micro-batch."""
    if count >= len(batch.sigma):
        return batch
    per_row = {
        field.name: getattr(batch, field.name)[:count] for field in fields(batch) if field.name not in ("sigmas", "age")
    }
    return replace(batch, **per_row)


def _at(predictions: list[Prediction] | None, index: int) -> Prediction | None:
    return predictions[index] if predictions is not None and index < len(predictions) else None


def _detached(prediction: Prediction) -> Prediction:
    return {name: value.detach() for name, value in prediction.items()}
