"""The gradients of parts of groups: computes each, adds it to the rank's sum, and checks that it was finite.

Each part's gradient starts from zero, so that an exact sum does not depend on the order of parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from async_flowrl.observability.flops import Meter
from async_flowrl.training.exact import ExactSum, mark_of
from async_flowrl.training.forward_passes import ForwardPasses, UpdateInputs
from async_flowrl.training.messages import GAP, PartStats, StepPlan
from async_flowrl.training.micro_batches import Group
from async_flowrl.training.parts import Part
from async_flowrl.training.shard_sum import ShardSum
from async_flowrl.training.update_metrics import GRADIENT, SQUARED, PartSums, UpdateMetrics, on_host


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are unchanged, the sum is not, and the message names the step.

    The message also names the group if it is known.
    """


@dataclass(frozen=True)
class UnderWay:
    """The optimizer step to which parts are added."""

    step: int
    """Training step."""
    plan: StepPlan
    measured: UpdateMetrics
    """Receives the spans and the statistics of the parts."""


class PartGradients:
    """Computes the gradients of parts and adds them to the sum of this rank."""

    def __init__(self, inputs: UpdateInputs, passes: ForwardPasses, total: ExactSum) -> None:
        """`total` is the sum; a ShardSum where the ranks have shares of the weights."""
        self._inputs, self._passes, self._sum = inputs, passes, total
        self._meter = Meter(inputs.policy.transformer)

    def add(self, group: Group, parts: Sequence[Part], under_way: UnderWay, *, probing: bool, reported: bool) -> None:
        """Computes parts of one group and adds the gradients of those that count; waits for the device only once.

        `probing`: the first one is probed, on all ranks of a replica alike. `reported`: the group is the one whose
        measurement counts. Raises NonFiniteError.
        """
        sums = [
            self._computed(group, part, under_way, probing=probing and index == 0, reported=reported)
            for index, part in enumerate(parts)
        ]
        added = [(part, of_part) for part, of_part in zip(parts, sums, strict=True) if of_part is not None]
        by_part = on_host([of_part for _, of_part in added])
        for (part, of_part), values in zip(added, by_part, strict=True):
            # This is checked for each part, and not only for the whole sum, so that the message can name the group.
            for what in ("loss", GRADIENT):
                if not math.isfinite(values[what]):
                    raise NonFiniteError(
                        f"step {under_way.step}, group {group.meta.group}: the {what} is {values[what]}"
                    )
            if part.counts:
                self._book(group, part, values, of_part.rows, under_way)
            elif isinstance(self._sum, ShardSum):
                self._sum.witness(values[GRADIENT])

    def _computed(
        self, group: Group, part: Part, under_way: UnderWay, *, probing: bool, reported: bool
    ) -> PartSums | None:
        """Computes one part, adds its gradient to the sum, and returns its statistics.

        A part that does not count adds nothing and returns None. With sharded weights, the ranks add the sum of the
        parts that they compute side by side, and a part that does not count adds zeros to it.
        """
        inputs, passes, plan, measured = self._inputs, self._passes, under_way.plan, under_way.measured
        batches = passes.batches(group, part)
        frozen = passes.predict_frozen(group, part, batches, plan, measured, probing=probing)
        sums, gap, sharded = PartSums(), None, inputs.parameters.sharded
        for index, batch in enumerate(batches):
            shape = batch.latents.shape, tuple(value.shape for value in group.conditioning.values())
            with self._meter.measure(shape):
                with measured.span("forward"):
                    output, behaviour = passes.train(group, index, batch, frozen)
                with measured.span("backward"):
                    loss = output.loss.sum() if part.counts or not sharded else output.loss.sum() * 0.0
                    loss.backward()  # type: ignore[no-untyped-call]
            measured.spans[-1] = replace(measured.spans[-1], flops=self._meter.flops(shape))
            sums.add(output)
            if probing and index == 0 and behaviour is not None:
                gap = passes.behaviour_gap(batch, behaviour)
        gradients = inputs.parameters.gradients
        if not part.counts and not sharded:
            gradients.zero_()
            return None
        if part.counts and probing and part.part == 0 and reported:
            sums.set_mean(GAP, gap)
        if not sharded:  # With shards, it would be the norm of a share of several parts.
            sums.set(SQUARED, torch.linalg.vector_norm(gradients, dtype=torch.float64).square())
        sums.set(GRADIENT, self._sum.add(gradients))
        return sums

    def _book(self, group: Group, part: Part, values: dict[str, float], rows: int, under_way: UnderWay) -> None:
        meta, squared, largest = group.meta, values.pop(SQUARED, math.nan), values.pop(GRADIENT)
        self._sum.book(mark_of(under_way.step, under_way.plan.update, meta.group, part.part), largest)
        start = min(group.train_steps)
        under_way.measured.parts.append(
            PartStats(meta.group, part.part, meta.version, meta.age, start, rows, values, squared)
        )
