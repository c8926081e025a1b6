"""One optimizer step of one rank: begin … accumulate (group by group, in ticket order) … finish.

A batch and a stream hand-over call the same functions in the same order, so they give the same bits.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from async_flowrl.observability.flops import Meter
from async_flowrl.observability.profiler import StepProfiler
from async_flowrl.training.forward_passes import ForwardPasses, UpdateInputs
from async_flowrl.training.fsdp import let_go
from async_flowrl.training.messages import GroupMeta, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.micro_batches import Group
from async_flowrl.training.optimizer import learning_rate, step_over_lr
from async_flowrl.training.trust_region import GradientPieces, TrustRegion
from async_flowrl.training.update_metrics import GroupMetrics, RowSums, UpdateMetrics
from async_flowrl.types import Conditioning, Span, Trajectory, Wording


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite. The weights were not touched; the message names step and group."""


class Update:
    """Accumulates gradients and steps; the only place where weights change."""

    def __init__(self, inputs: UpdateInputs) -> None:
        self._inputs = inputs
        self._passes = ForwardPasses(inputs)
        self._region = TrustRegion(inputs, self._passes)
        self._pieces = GradientPieces()
        self._scratch = torch.zeros_like(inputs.parameters.gradients)
        """While gradients accumulate, their sum before the last group; then the weights before the optimizer step."""
        self._step: int | None = None
        self._plan = StepPlan(rows=0)
        self._measured = UpdateMetrics()
        self._before: list[Span] = []
        self._meter = Meter(inputs.policy.transformer)
        self._profiler = StepProfiler(inputs.config, f"trainer-{inputs.world.rank}")

    def set_negatives(self, conditionings: Mapping[Wording, Conditioning]) -> None:
        """Conditioning of the negative prompts by text, once per run."""
        self._passes.set_negatives(conditionings)

    def proximal(self, request: TrainRequest, *trajectories: Trajectory) -> None:
        """Predicts, under the live weights, for groups that a later optimizer step of this batch trains on."""
        measured = UpdateMetrics()
        for group in self._groups(request.metas, trajectories):
            self._passes.remember_proximal(group, measured)
        self._before.extend(measured.spans)

    def begin(self, step: int, plan: StepPlan) -> None:
        """Clears gradients and statistics. `step` is the batch; its optimizer steps come as plan.update = 0, 1, ..."""
        last = self._inputs.config.trainer.updates_per_batch - 1
        if not 0 <= plan.update <= last:
            raise ValueError(f"step {step} has no update {plan.update}: trainer.updates_per_batch is {last + 1}")
        self._step, self._plan, self._measured = step, plan, UpdateMetrics()
        self._measured.spans, self._before = self._before, []
        if plan.update == 0:
            self._profiler.start(step)
        self._inputs.parameters.gradients.zero_()
        self._pieces.begin(self._scratch)
        self._region.begin()

    def accumulate(self, metas: Sequence[GroupMeta], *trajectories: Trajectory) -> None:
        """Adds the gradient of groups, in order; each group's tickets stand together in `trajectories`.

        Raises NonFiniteError naming step and group, and ValueError where a group does not fit the run.
        """
        if self._step is None:
            raise RuntimeError("accumulate was called before begin")
        if self._plan.rows <= 0:
            raise ValueError(f"step {self._step} has groups to train on, but its plan counts {self._plan.rows} rows")
        for group in self._groups(metas, trajectories):
            self._train(group, self._step)

    def finish(self) -> UpdateStats:
        """Sums gradients over the ranks, clips and steps; without a group to train on the weights stay as they are.

        (Adam's momentum would move them.) Raises NonFiniteError, before anything changed.
        """
        if self._step is None:
            raise RuntimeError("finish was called before begin")
        step, self._step = self._step, None
        last = self._plan.update == self._inputs.config.trainer.updates_per_batch - 1
        if last:
            self._passes.forget_proximal()
        stats = self._optimize(step)
        if last:
            self._profiler.stop()
        return stats

    def _optimize(self, step: int) -> UpdateStats:
        inputs, plan, measured = self._inputs, self._plan, self._measured
        rate = learning_rate(inputs.config.trainer, step, inputs.config.total_steps)
        if not measured.groups:
            return UpdateStats(step, plan.update, True, {"lr": rate}, spans=tuple(measured.spans))
        if self._region.measures:
            with measured.span("probe"):
                self._region.prepare()
        with measured.span("optimizer"):
            inputs.world.sum(inputs.parameters.gradients)
            norm = inputs.optimizer.gradient_norm()
            if not math.isfinite(norm):
                groups = ", ".join(str(group.meta.group) for group in measured.groups)
                raise NonFiniteError(f"step {step}: the summed gradient of groups {groups} is not finite")
            signal = self._pieces.signal_to_noise(inputs.world, norm)
            before = self._scratch.copy_(inputs.parameters.values.data)
            taken = inputs.optimizer.step(rate, norm)
            taken["optimizer/step_over_lr"] = step_over_lr(before, inputs.parameters, rate)
            measured.reduce(inputs.world, inputs.device)
        metrics = {**measured.metrics(plan.rows), **taken, **signal}
        if self._region.measures:
            with measured.span("probe"):
                metrics |= self._region.bound(before)
                let_go(inputs.policy.transformer)
        return UpdateStats(step, plan.update, False, metrics, measured.kept(), measured.stats(), tuple(measured.spans))

    def _groups(self, metas: Sequence[GroupMeta], trajectories: Sequence[Trajectory]) -> Iterable[Group]:
        expected = sum(meta.tickets for meta in metas)
        if expected != len(trajectories):
            raise ValueError(f"{len(metas)} groups have {expected} tickets, got {len(trajectories)} trajectories")
        start = 0
        for meta in metas:
            yield Group(meta, trajectories[start : start + meta.tickets], device=self._inputs.device)
            start += meta.tickets

    def _train(self, group: Group, step: int) -> None:
        passes, plan, measured = self._passes, self._plan, self._measured
        batches = passes.batches(group)
        frozen = passes.predict_frozen(group, batches, plan, measured)
        sums = RowSums()
        for index, batch in enumerate(batches):
            shape = len(batch.sigma), tuple(value.shape for value in group.conditioning.values())
            with self._meter.measure(shape):
                with measured.span("forward"):
                    output, behaviour = passes.train(group, index, batch, frozen)
                with measured.span("backward"):
                    (output.loss.sum() / plan.rows).backward()  # type: ignore[no-untyped-call]
            measured.spans[-1] = replace(measured.spans[-1], flops=self._meter.flops(shape))
            sums.add(output)
            if index == 0 and behaviour is not None and passes.probing(plan, measured):
                sums.set_mean("behaviour_gap", passes.behaviour_gap(batch, behaviour))
        if sums.rows == 0:
            return
        # Here and not only on the summed gradient, so that the message can name the group.
        totals, gradient = sums.totals(self._inputs.parameters.gradients.sum(dtype=torch.float64))
        for what, value in (("loss", totals["loss"]), ("gradient", gradient)):
            if not math.isfinite(value):
                raise NonFiniteError(f"step {step}, group {group.meta.group}: the {what} is {value}")
        self._region.remember(group, batches)
        self._pieces.add(self._inputs.parameters.gradients, self._scratch)
        measured.groups.append(GroupMetrics(group.meta, min(group.train_steps), totals, sums.rows))
