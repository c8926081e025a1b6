"""Optimizer steps of one trainer rank, by calls in this order: begin, accumulate (any number), add_up, take_step.

Each part's gradient starts from zero and is added exactly (exact.py), so neither the order of groups nor the choice of
ranks changes a bit of the weights.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from async_flowrl.observability.flops import Meter
from async_flowrl.observability.profiler import StepProfiler
from async_flowrl.training.exact import Account, ExactSum, ShardSum, fitting_exponent, mark_of
from async_flowrl.training.forward_passes import (
    GRADIENT,
    SQUARED,
    ForwardPasses,
    PartSums,
    UpdateInputs,
    UpdateMetrics,
    on_host,
)
from async_flowrl.training.fsdp import free_gathered
from async_flowrl.training.messages import (
    GAP,
    GroupMeta,
    GroupSums,
    Manifest,
    PartStats,
    StepPlan,
    TrainRequest,
    UpdateStats,
)
from async_flowrl.training.optimizer import learning_rate, step_over_lr
from async_flowrl.training.parts import Group, Part, groups_of
from async_flowrl.training.trust_region import TrustRegion
from async_flowrl.transfers import memory_of
from async_flowrl.types import Conditioning, EncoderInput, Span, Trajectory


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are unchanged, and the message names step and group."""


class Update:
    """Accumulates gradients and takes optimizer steps; no other object changes the trained weights during training."""

    def __init__(self, inputs: UpdateInputs) -> None:
        self._inputs = inputs
        self._passes = ForwardPasses(inputs)
        self._region = TrustRegion(inputs, self._passes)
        kind = ShardSum if inputs.parameters.sharded else ExactSum
        memory = memory_of(inputs.config.trainer.sum_on, inputs.device)
        self.sum = kind(len(inputs.parameters.gradients), inputs.device, memory)
        self._meter = Meter()
        # Exponent that the next `begin` sets, because the present sum may have left its range; None: it stays.
        self._next_exponent: int | None = None
        self.planned = Account()  # Account of the parts that all ranks together have to add.
        # Lowest number of a group in this optimizer step so far; the first part of that group is probed.
        self._lowest: int | None = None
        self._group_sums: GroupSums = {}
        self._fetched: list[int] = []  # Bytes of each trajectory that came.
        # Training step under way, whose gradients are not in the weights yet; None if none is.
        self.under_way: int | None = None
        # `_summed`: the sums of all ranks were added up. `_broken`: a call that added to this rank's sum failed.
        self._summed = self._broken = False
        self.plan = StepPlan(rows=0)
        self._measured = UpdateMetrics()
        self._before: list[Span] = []
        self._profiler = StepProfiler(inputs.config, f"trainer-{inputs.world.rank}")

    @property
    def exponent(self) -> int:
        """Exponent of the power of two in whose multiples gradients are added; it never falls; checkpoints have it."""
        return self.sum.exponent

    @exponent.setter
    def exponent(self, value: int) -> None:
        self.sum.exponent, self._next_exponent = value, None

    def set_negatives(self, conditionings: Mapping[EncoderInput, Conditioning]) -> None:
        self._passes.set_negatives(conditionings)

    @property
    def manifest(self) -> Manifest:
        """Parts that this rank has added to the optimizer step under way. Raises RuntimeError if none is under way."""
        if self.under_way is None:
            raise RuntimeError("no optimizer step is under way")
        parts = tuple((part.group, part.part) for part in self._measured.parts)
        return Manifest(self.under_way, self.plan.update, self.plan.attempt, parts)

    def proximal(self, request: TrainRequest, *trajectories: Trajectory) -> None:
        """Computes predictions of the weights at the start of the batch, for groups of a later step."""
        self._fetched += [trajectory.nbytes for trajectory in trajectories]
        measured = UpdateMetrics()
        with self._inputs.turn():
            for group, parts in self._mine(request.metas, trajectories, request.tickets):
                for part in parts:
                    self._passes.remember_proximal(group, part, measured)
        self._before.extend(measured.spans)

    def group_sums(self, request: TrainRequest, *trajectories: Trajectory) -> GroupSums:
        """Returns the sums of `Algorithm.group_terms` of this rank's parts, of this and the earlier calls of a step."""
        self._fetched += [trajectory.nbytes for trajectory in trajectories]
        measured = UpdateMetrics()
        with self._inputs.turn():
            for group, parts in self._mine(request.metas, trajectories, request.tickets):
                for part in parts:
                    sums = self._passes.group_sums(group, part, measured)
                    if part.counts:
                        self._group_sums[group.meta.group, part.part] = sums
        self._before.extend(measured.spans)
        return self._group_sums

    def begin(self, step: int, plan: StepPlan) -> None:
        """Begins optimizer step `plan.update` of training step `step`. Raises ValueError if there is none."""
        last = self._inputs.config.trainer.updates_per_batch - 1
        if not 0 <= plan.update <= last:
            raise ValueError(f"step {step} has no update {plan.update}: trainer.updates_per_batch is {last + 1}")
        self.under_way, self.plan, self._measured = step, plan, UpdateMetrics()
        self._measured.spans, self._before = self._before, []
        self._summed = self._broken = False
        if plan.update == 0:
            self._profiler.start(step)
        self._inputs.parameters.gradients.zero_()
        if self._next_exponent is not None:
            self.exponent = self._next_exponent
        self.sum.begin()
        self.planned, self._lowest = Account(), None
        self._region.begin()

    def accumulate(
        self, metas: Sequence[GroupMeta], *trajectories: Trajectory, tickets: Sequence[Sequence[int]] = ()
    ) -> None:
        """Adds the gradients of this rank's parts of the groups.

        `trajectories` are in the order of `metas`; `tickets` has per group the positions of those passed (empty: all).
        Raises NonFiniteError, ValueError if a group does not fit the run, RuntimeError outside of a step or after a
        failed call.
        """
        step = self._begun("accumulate")
        if self.plan.rows <= 0:
            raise ValueError(f"step {step} has groups to train on, but its plan counts {self.plan.rows} rows")
        self._fetched += [trajectory.nbytes for trajectory in trajectories]
        probed = self._lower_than_all_before(metas)
        probing = probed is not None and self.plan.update == 0 and self._inputs.algorithm.records == "transitions"
        self._broken = True  # After an error, the sum may have only some of the parts, and the gradient half of one.
        for group, parts in self._mine(metas, trajectories, tickets):
            if group.meta.group == probed and self._inputs.world.size == 1:
                self._remember(group)
            reported = group.meta.group == probed
            self._add_parts(step, group, parts, probing=probing, reported=reported)
            probing = False
        self._broken = False
        counted = [(meta.group, len(meta.parts)) for meta in metas]
        self.planned = self.planned.joined(self._account_of(step, counted))

    def _add_parts(self, step: int, group: Group, parts: Sequence[Part], *, probing: bool, reported: bool) -> None:
        """Adds the parts of one group that count; waits for the device once. Raises NonFiniteError."""
        sums = [
            self._computed(group, part, probing=probing and index == 0, reported=reported)
            for index, part in enumerate(parts)
        ]
        added = [(part, of_part) for part, of_part in zip(parts, sums, strict=True) if of_part is not None]
        by_part = on_host([of_part for _, of_part in added])
        for (part, of_part), values in zip(added, by_part, strict=True):
            # This is checked for each part, and not only for the whole sum, so that the message can name the group.
            for what in ("loss", GRADIENT):
                if not math.isfinite(values[what]):
                    raise NonFiniteError(f"step {step}, group {group.meta.group}: the {what} is {values[what]}")
            if part.counts:
                self._book(step, group, part, values, of_part.rows)
            elif isinstance(self.sum, ShardSum):
                self.sum.book_magnitude(values[GRADIENT])

    def _computed(self, group: Group, part: Part, *, probing: bool, reported: bool) -> PartSums | None:
        """Adds a part's gradient to the sum (in shares, zeros if it does not count) and returns its statistics."""
        inputs, passes, plan, measured = self._inputs, self._passes, self.plan, self._measured
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
        sums.set(GRADIENT, self.sum.add(gradients))
        return sums

    def _book(self, step: int, group: Group, part: Part, values: dict[str, float], rows: int) -> None:
        meta, squared, largest = group.meta, values.pop(SQUARED, math.nan), values.pop(GRADIENT)
        self.sum.book(mark_of(step, self.plan.update, meta.group, part.part), largest)
        start = min(group.train_steps)
        self._measured.parts.append(PartStats(meta.group, part.part, meta.age, start, rows, values, squared))

    def _begun(self, call: str) -> int:
        if self.under_way is None:
            raise RuntimeError(f"{call} was called before begin")
        if self._broken:
            raise RuntimeError(
                f"step {self.under_way}: {call} was called after a call that failed; the sum must begin again"
            )
        return self.under_way

    def _lower_than_all_before(self, metas: Sequence[GroupMeta]) -> int | None:
        groups = [meta.group for meta in metas if meta.parts]
        if not groups or (self._lowest is not None and self._lowest < min(groups)):
            return None
        self._lowest = min(groups)
        return self._lowest

    def _remember(self, group: Group) -> None:
        if self._region.due:
            self._region.remember(group, self._passes.batches(group, Part(0, 0)))

    def _account_of(self, step: int, groups: Sequence[tuple[int, int]]) -> Account:
        account = Account()
        for group, parts in groups:
            for part in range(parts):
                account = account.plus(mark_of(step, self.plan.update, group, part))
        return account

    def add_up(self, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        """Adds up the sums of all ranks, which all must call it; no weight changes.

        Returns None, or the exponent (exact.py) with which the sum may have overflowed; the step must then begin again.
        `trajectories` are those of the probe. Raises RuntimeError if a planned part is not in the
        sum exactly once, and for a request of another attempt.
        """
        step, plan, measured = self._begun("add_up"), self.plan, self._measured
        if request.attempt != plan.attempt:
            raise RuntimeError(f"step {step}: attempt {request.attempt} is added up, this rank began {plan.attempt}")
        if request.rows is not None:
            self.plan = replace(plan, rows=request.rows)
        if request.planned is not None:
            self.planned = self._account_of(step, request.planned)
        if request.probe is not None:
            self._fetched += [trajectory.nbytes for trajectory in trajectories]
            self._remember(Group(request.probe, trajectories, device=self._inputs.device, held=request.probe_tickets))
        overflow = None
        if self.planned.count:
            if self._region.measures:
                with self._inputs.turn(), measured.span("probe"):
                    self._region.prepare()
            with measured.span("optimizer"):
                overflow = self._add(step)
        if overflow is not None:
            self._before = measured.spans
        self._summed = overflow is None
        return overflow

    def take_step(self) -> UpdateStats:
        """Clips the mean of the summed gradients and takes the optimizer step, without waiting for other replicas.

        A step with no group leaves the weights as they are, though Adam's momentum would move them. Raises
        NonFiniteError before any weight changes.
        """
        if self.under_way is None or not self._summed:
            raise RuntimeError("take_step was called before add_up")
        step, self.under_way, self._summed = self.under_way, None, False
        stats = replace(self._optimize(step), measures_next=self._region.due, fetched=tuple(self._fetched))
        self._fetched.clear()
        self._group_sums = {}
        if self.plan.update == self._inputs.config.trainer.updates_per_batch - 1:
            self._passes.forget_proximal()
            self._profiler.stop()
        return stats

    def _optimize(self, step: int) -> UpdateStats:
        inputs, plan, measured = self._inputs, self.plan, self._measured
        rate = learning_rate(inputs.config.trainer, step, inputs.config.total_steps)
        stats = UpdateStats(step, plan.update, self.planned.count == 0, {"lr": rate}, rows=plan.rows)
        if stats.skipped:
            return replace(stats, spans=tuple(measured.spans))
        with measured.span("optimizer"):
            self.sum.mean(inputs.parameters.gradients, plan.rows)
            before = self.sum.scratch()
            step_metrics = self.step_from(before, rate, step)
        if self._region.measures:
            with self._inputs.turn(), measured.span("probe"):
                step_metrics |= self._region.bound(before)
                free_gathered(inputs.policy.transformer)
        return replace(stats, metrics=step_metrics, spans=tuple(measured.spans), parts=tuple(measured.parts))

    def _add(self, step: int) -> int | None:
        """Adds up the sums of all ranks; returns the exponent if the sum may have overflowed with it, else None."""
        inputs, total = self._inputs, self.sum
        account = total.reduce(inputs.world)
        if not account.holds(self.planned):
            raise RuntimeError(
                f"step {step}: the ranks added {account.count} parts of groups, and of {self.planned.count} that were "
                "planned not each was added once"
            )
        if not account.fits(total.exponent):
            self._next_exponent = fitting_exponent(account, total.exponent)
            return total.exponent
        return None

    def step_from(self, before: Tensor, rate: float, step: int) -> dict[str, float]:
        """Takes one step of the optimizer and returns its metrics; copies the weights before it to `before`."""
        inputs = self._inputs
        norms = inputs.optimizer.gradient_norms()
        if not math.isfinite(norm := math.hypot(*norms.values())):
            raise NonFiniteError(f"step {step}: the norm of the summed gradient is {norm}")
        before.copy_(inputs.parameters.values.data)
        step_metrics = inputs.optimizer.step(rate, norms)
        over_lr = step_over_lr(before, inputs.parameters, rate, inputs.optimizer.stepped)
        return {**step_metrics, "optimizer/step_over_lr": over_lr}

    def _mine(
        self, metas: Sequence[GroupMeta], trajectories: Sequence[Trajectory], tickets: Sequence[Sequence[int]]
    ) -> Iterator[tuple[Group, list[Part]]]:
        return groups_of(metas, trajectories, tickets, self._inputs.world, self._inputs.device)
