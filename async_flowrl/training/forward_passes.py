"""The forward passes of a trainer rank: predictions of a group's rows under the sets of weights that the loss needs.

    proximal    the weights at the start of the batch; needed only for its second and later optimizer steps
    behaviour   the version that made the group's images
    reference   the model before training: the LoRA is off or as in `lora.path`; with tune=full the first weights; with
                `algorithm.reference_every` the weights after the last such step
    average     the moving average of `algorithm.average_decay`
    teacher     the LoRA of `algorithm.teachers` that the group's prompt asks for
    current     the trained weights; the only pass that a backward pass follows

All run with the same shapes, grad mode and code, so equal weights give equal bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from time import time
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.algorithms.base import (
    Algorithm,
    LossOutput,
    MicroBatch,
    Prediction,
    Velocity,
    detached,
    keeps_proximal,
)
from async_flowrl.algorithms.sde import expand
from async_flowrl.config.schema import Config
from async_flowrl.policies.lora import reference_mode
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.training.differentiable_reward import DifferentiableReward
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.messages import GAP, PartStats, StepPlan
from async_flowrl.training.optimizer import Optimizer
from async_flowrl.training.parts import Group, Part, World, to_device
from async_flowrl.transfers import upload
from async_flowrl.types import Conditioning, EncoderInput, Span

# Number of rows whose log-probs are recomputed per batch under the behaviour weights, to compare the two engines.
PROBED_ROWS = 4
# Predictions that `Algorithm.group_terms` gets: those that are there before a group's parts are trained.
OF_GROUPS = ("reference", "average")


@dataclass
class UpdateInputs:
    config: Config
    policy: PipelinePolicy
    algorithm: Algorithm
    parameters: FlatParameters
    optimizer: Optimizer
    world: World
    device: torch.device
    sampled_by: Callable[[int], Tensor]  # Function from a version to its flat weights, with which rollouts made images.
    # True if rollouts sample from a moving average, so even images of staleness 0 are not from the trained weights.
    averaged: bool
    reference: Tensor | None  # Flat weights of the KL reference; None means that the LoRA is switched off.
    average: Tensor | None  # Flat weights of the moving average that the loss compares with, if there is one.
    teachers: Mapping[str, Tensor]  # Label → flat weights.
    reward: DifferentiableReward | None = None  # For algorithms with `differentiates_reward`.
    # Entered while the network computes. In a process that samples, too, no ticket is made inside.
    turn: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class FrozenPredictions:
    """Predictions without gradients for one part of a group, by name: one per micro-batch."""

    by_name: Mapping[str, list[Prediction]]
    # True if the trained weights themselves made the images, so that `current` serves as behaviour prediction.
    on_policy: bool


class UpdateMetrics:
    def __init__(self) -> None:
        self.parts: list[PartStats] = []
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time()))


class ForwardPasses:
    """Computes predictions, and keeps the proximal ones until the batch ends."""

    def __init__(self, inputs: UpdateInputs) -> None:
        self._inputs = inputs
        self._negatives: dict[EncoderInput, dict[str, Tensor]] = {}
        # Conditioning of negative prompts as `set_negatives` got it, on the host.
        self.negatives: Mapping[EncoderInput, Conditioning] = {}
        self._proximal: dict[tuple[int, int], list[Prediction]] = {}

    def set_negatives(self, conditionings: Mapping[EncoderInput, Conditioning]) -> None:
        self.negatives = conditionings
        self._negatives = {text: to_device(value, self._inputs.device) for text, value in conditionings.items()}

    def batches(self, group: Group, part: Part) -> list[MicroBatch]:
        inputs, trainer = self._inputs, self._inputs.config.trainer
        return list(
            group.micro_batches(
                inputs.algorithm.records, part.part, steps=trainer.timesteps_per_forward or len(group.train_steps)
            )
        )

    def remember_proximal(self, group: Group, part: Part, measured: UpdateMetrics) -> None:
        """Computes and keeps predictions under the active weights, for a later optimizer step of this batch."""
        with measured.span("proximal"):
            self._proximal[group.meta.group, part.part] = self.predict(group, self.batches(group, part))

    def forget_proximal(self) -> None:
        self._proximal.clear()

    def predict_frozen(
        self,
        group: Group,
        part: Part,
        batches: Sequence[MicroBatch],
        plan: StepPlan,
        measured: UpdateMetrics,
        *,
        probing: bool,
    ) -> FrozenPredictions:
        """Returns all predictions of a part except `current`; with `probing` a few of `behaviour` for the probe."""
        inputs, meta = self._inputs, group.meta
        by_name = dict[str, list[Prediction]]()
        proximal = self._proximal.get((meta.group, part.part)) if plan.update > 0 else None
        lacks_proximal = plan.update > 0 and proximal is None
        if lacks_proximal and part.counts and keeps_proximal(inputs.algorithm):
            raise ValueError(f"group {meta.group} has no proximal predictions for update {plan.update} of the batch")
        fresh = meta.age == 0 and not inputs.averaged
        if proximal is not None:
            by_name["proximal"] = proximal
            if fresh:
                by_name["behaviour"] = proximal
        if not fresh and (probed := self._behaviour_batches(batches, probing=probing and plan.replay)):
            with measured.span("behaviour"), inputs.parameters.swapped(inputs.sampled_by(meta.version)):
                by_name["behaviour"] = self.predict(group, probed)
        by_name |= self._compared(group, batches, measured)
        return FrozenPredictions(by_name, on_policy=fresh and (plan.update == 0 or lacks_proximal))

    def _compared(
        self, group: Group, batches: Sequence[MicroBatch], measured: UpdateMetrics
    ) -> dict[str, list[Prediction]]:
        """Returns the predictions of `reference`, `average` and `teacher`, if they are needed."""
        inputs, by_name = self._inputs, dict[str, list[Prediction]]()
        teacher = inputs.teachers.get(group.meta.teacher)
        for name, flat in (("reference", inputs.reference), ("average", inputs.average), ("teacher", teacher)):
            if name in inputs.algorithm.needs:
                under = reference_mode(inputs.policy.transformer) if flat is None else inputs.parameters.swapped(flat)
                with measured.span(name), under:
                    guidance = inputs.config.algorithm.reference_cfg_scale if name == "reference" else None
                    by_name[name] = self.predict(group, batches, guidance=guidance)
        return by_name

    def train(
        self, group: Group, index: int, batch: MicroBatch, frozen: FrozenPredictions
    ) -> tuple[LossOutput, Prediction | None]:
        """Returns the loss, with its graph, of micro-batch number `index`, and its behaviour prediction or None."""
        algorithm, reward = self._inputs.algorithm, self._inputs.reward
        if reward is not None:
            batch = replace(batch, score=reward.of(group.meta))
        current = algorithm.predict(batch, self._velocity(group))
        of_batch = {name: of[index] for name, of in frozen.by_name.items() if index < len(of)}
        if frozen.on_policy:
            of_batch["behaviour"] = detached(current)
        needed = {name: of for name, of in of_batch.items() if name in algorithm.needs}
        if batch.group_means is None and getattr(algorithm, "group_terms", None) is not None:
            seen = {name: of for name, of in needed.items() if name in OF_GROUPS}
            terms = self._result("group_terms", batch, detached(current), seen)
            batch = replace(batch, group_means=means_of_levels(batch, terms))
        output: LossOutput = self._result("loss", batch, current, needed)
        for name, value in (("loss", output.loss), *output.metrics.items()):
            if getattr(value, "shape", None) != batch.sigma.shape:
                given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                rows = f"must be a tensor [{len(batch.sigma)}], a number per row, got {given}"
                raise ValueError(f"{name} of algorithm {algorithm.name} {rows}")
        return output, of_batch.get("behaviour")

    def group_sums(self, group: Group, part: Part, measured: UpdateMetrics) -> list[list[float]]:
        """Returns, for each trained level, the sums of `Algorithm.group_terms` over the images of a part."""
        batches = self.batches(group, part)
        compared = self._compared(group, batches, measured)
        with measured.span("group_terms"):
            current = self.predict(group, batches)
        sums = list[Tensor]()
        for index, batch in enumerate(batches):
            frozen = {name: of[index] for name, of in compared.items() if name in OF_GROUPS}
            terms: Tensor = self._result("group_terms", batch, current[index], frozen)
            by_level = terms.reshape(len(set(batch.steps.tolist())), -1, terms.shape[-1])
            sums.append(by_level.sum(dim=1))
        levels: list[list[float]] = torch.cat(sums).tolist()
        return levels

    def clean(self, group: Group, batch: MicroBatch) -> Tensor:
        """Returns the clean latents x - sigma · v [B, ...] that the trained weights predict."""
        velocity = self._velocity(group)(batch.latents, batch.sigma).detach()
        return batch.latents - expand(batch.sigma, batch.latents) * velocity

    def behaviour_gap(self, batch: MicroBatch, behaviour: Prediction) -> Tensor | None:
        """Returns the mean of |behaviour log-prob - recorded one|, trainer against engine at equal weights; or None."""
        rows = len(next(iter(cast("dict[str, Tensor]", behaviour).values())))
        metrics = self._result("loss", first_rows(batch, rows), behaviour, {}).metrics
        return metrics["log_prob_gap"].double().mean() if "log_prob_gap" in metrics else None

    def _result(self, method: str, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> Any:
        """Returns what `loss` or `group_terms` does. Raises ValueError that names what it does not find by a text."""
        algorithm = self._inputs.algorithm
        try:
            return getattr(algorithm, method)(batch, current, frozen)
        except KeyError as error:
            # It may be the reward's own, or of a table by numbers.
            if batch.score is not None or not isinstance(error.args[0], str):
                raise
            others = ", ".join(frozen) or "none (that of behaviour_gap never has one)"
            has = f"a prediction has {', '.join(current)}, and of the weights in `needs` this call has {others}"
            raise ValueError(f"the {method} of algorithm {algorithm.name} finds no {error}: {has}") from error

    def _behaviour_batches(self, batches: Sequence[MicroBatch], *, probing: bool) -> list[MicroBatch]:
        if "behaviour" in self._inputs.algorithm.needs:
            return list(batches)
        return [first_rows(batch, PROBED_ROWS) for batch in batches[:1]] if probing else []

    def predict(
        self, group: Group, batches: Sequence[MicroBatch], *, guidance: float | None = None
    ) -> list[Prediction]:
        """Returns detached predictions. Gradients are enabled, because another grad mode may use other kernels."""
        velocity = self._velocity(group, guidance)
        return [detached(self._inputs.algorithm.predict(batch, velocity)) for batch in batches]

    def _velocity(self, group: Group, guidance: float | None = None) -> Velocity:
        policy, meta = self._inputs.policy, group.meta
        negative, sampling = None, meta.sampling
        if guidance is not None:
            sampling = replace(sampling, true_cfg_scale=guidance, true_cfg_scale_2=None)
        if sampling.true_cfg_scale > 1:
            negative = group.negative or self._negatives.get(meta.negative)
            if negative is None:
                raise ValueError(f"the conditioning of negative prompt {meta.negative!r} was not set")
        return lambda latents, sigma: policy.velocity(latents, sigma, group.conditioning, negative, sampling)


def means_of_levels(batch: MicroBatch, terms: Tensor) -> Tensor:
    """Returns, in each row [B, K], the mean of `terms` [B, K] over the rows of its level."""
    same = upload((batch.steps[:, None] == batch.steps[None]).to(terms.dtype), terms.device)
    return same @ terms / same.sum(dim=1, keepdim=True)


def first_rows(batch: MicroBatch, count: int, *, start: int = 0) -> MicroBatch:
    """Returns `count` rows of a micro-batch from row `start` on, or the micro-batch if it has no more rows."""
    if count >= len(batch.sigma):
        return batch
    rows = slice(start, start + count)
    return replace(batch, **{name: getattr(batch, name)[rows] for name in _per_row(batch)})


def copied(batch: MicroBatch) -> MicroBatch:
    """Returns the micro-batch with tensors of its own, because slices keep the memory of what they are cut from."""
    rows: dict[str, Any] = {name: getattr(batch, name) for name in _per_row(batch)}
    copies: dict[str, Any] = {name: of.clone() if isinstance(of, Tensor) else of for name, of in rows.items()}
    return replace(batch, **copies)


def _per_row(batch: MicroBatch) -> list[str]:
    names = [field.name for field in fields(batch) if field.name not in ("sigmas", "age", "score")]
    return [name for name in names if getattr(batch, name) is not None]


# Names of the trainer's own numbers of a part: loss, squared norm and largest magnitude of its gradient.
LOSS, SQUARED, GRADIENT = "loss", "gradient, squared", "gradient"
_OWN = (LOSS, SQUARED, GRADIENT, GAP)


class PartSums:
    """Sums of a part's numbers per row; they stay on the device until `on_host`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.rows = 0

    def add(self, output: LossOutput) -> None:
        """Adds loss and metrics of a micro-batch. ValueError for a reserved name."""
        self.rows += len(output.loss)
        if reserved := [name for name in output.metrics if name in _OWN]:
            raise ValueError(
                f"the algorithm reports a metric named {reserved[0]!r}, which the trainer itself reports: give it "
                f"another name than {', '.join(map(repr, _OWN))}"
            )
        rows: Mapping[str, Tensor] = {**output.metrics, LOSS: output.loss.detach()}
        for name, values in rows.items():
            total = values.detach().double().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def set_mean(self, name: str, mean: Tensor | None) -> None:
        """Sets a number of which only the mean is known, as if every row had it. Call it after the last `add`."""
        if mean is not None:
            self._sums[name] = mean * self.rows

    def set(self, name: str, value: Tensor) -> None:
        self._sums[name] = value.double()


def on_host(parts: Sequence[PartSums]) -> list[dict[str, float]]:
    """Returns the numbers of each part by name, with a single copy from the device for all of them."""
    names = [sorted(part._sums) for part in parts]
    numbers = [part._sums[name] for part, of_part in zip(parts, names, strict=True) for name in of_part]
    values = iter(torch.stack(numbers).tolist() if numbers else ())
    return [{name: next(values) for name in of_part} for of_part in names]
