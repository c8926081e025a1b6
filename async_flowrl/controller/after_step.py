"""AfterStep does the work between training steps: metrics, checkpoints, and the start of evaluations.

The loop (run/loop.py) calls it. Checkpoints are written, and evaluations made, while training goes on.
"""

import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from async_flowrl.algorithms.diagnostics import clip_of_means, warnings
from async_flowrl.config.curves import checkpoint_due, evaluation_due
from async_flowrl.config.schema import Config
from async_flowrl.controller.checkpoints import Checkpoints
from async_flowrl.controller.context import Context
from async_flowrl.controller.evaluation import EvaluationRecords, Evaluations
from async_flowrl.controller.kept_state import KeptStates
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.summary import FLAT

logger = logging.getLogger(__name__)

# Keys that every line of metrics.jsonl has. A value is null if the algorithm does not measure it or no image was
# trained on in this step.
MEASURED = (
    *("reward/mean", "reward/std", "zero_std_ratio", "staleness/mean", "staleness/max"),
    *("loss", "grad_norm", "lr", "ratio/mean", "clip_fraction", "kl", "log_prob_gap"),
)

FLAT_STEPS = 5  # Steps in a row in which no group has a spread of rewards, after which the run warns.


@dataclass
class AfterStep:
    """The work between training steps of one attempt, i.e. of one start or recovery of a run."""

    metrics: MetricsLog
    monitor: Monitor
    checkpoints: Checkpoints
    pools: PoolLedger
    records: EvaluationRecords
    latent_elements: int  # Number of elements in the latents of one image.
    correction: str  # What `algorithm.correction` means in this run.
    kept: KeptStates = field(default_factory=KeptStates)
    held: Collection[int] = ()  # Versions of earlier attempts whose weights are held for their evaluation.
    evaluations: Evaluations = field(init=False)
    # True once the loop has done its last step and that step's checkpoint is written. A later failure, e.g. of an
    # evaluation, is then only recorded and does not fail the run.
    trained: bool = False
    flat: int = 0  # Number of the last steps in a row in which no group had a spread of rewards.

    def __post_init__(self) -> None:
        self.evaluations = Evaluations(self.records.show, self.records.failed)
        self._step_began = self._stalled = 0.0

    async def before_training(self, ctx: Context) -> None:
        """Writes the first checkpoint, then starts due evaluations; that of the last version is left to `drain`."""
        await self._save(ctx, ctx.table.step)
        await self.checkpoints.written()
        due = [version for version in self._unevaluated(ctx) if version < ctx.config.total_steps]
        evaluate = ctx.config.evaluate
        if evaluate.baseline and self.records.log.baseline() is None and ctx.table.step == 0:
            await self.evaluations.start(ctx, 0, baselines=(True, False) if 0 in due else (True,))
            due = [version for version in due if version > 0]
        for version in due:
            await self.evaluations.start(ctx, version)
        self._step_began, self._stalled = ctx.observer.now(), stalled(ctx)
        self.pools.lap()

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        """Writes the step's metrics and starts what is due. Raises the error of an earlier evaluation or checkpoint."""
        began, self._step_began = self._step_began, ctx.observer.now()
        seconds = self._step_began - began
        ctx.observer.event("step", step=step, started=began, ended=self._step_began)
        line = stats | self._timing(ctx, seconds) | {"images_per_s": stats["images"] / max(seconds, 1e-9)}
        self._warn(ctx, line)
        self.metrics.append(step, dict.fromkeys(MEASURED) | line | self.records.metric_keys(step))
        self.monitor.log(step, line)
        self.evaluations.check()
        await self.checkpoints.check()
        version = step + 1
        if ctx.config.keeps_state:
            part = self.checkpoints.controller_part(ctx, version)
            await self.kept.keep(ctx, self.checkpoints.trainers.first, version, part)
        if checkpoint_due(ctx.config, version) or self.checkpoints.overdue(self._step_began):
            await self._save(ctx, version)
        if version < ctx.config.total_steps and evaluation_due(ctx.config, version):
            await self.evaluations.start(ctx, version)

    async def drain(self, ctx: Context) -> None:
        """Writes the last checkpoint (or raises SaveFailed), then waits for all evaluations."""
        await ctx.work.until(lambda: ctx.table.step in ctx.table.published)
        await self.checkpoints.insist(ctx, ctx.table.step)
        self.trained = True
        if ctx.table.step == ctx.config.total_steps and self._lacking(ctx.config, ctx.config.total_steps):
            await self.evaluations.start(ctx, ctx.config.total_steps)
        await self.evaluations.drain()

    def _unevaluated(self, ctx: Context) -> list[int]:
        """Returns the versions whose evaluation is due, not recorded and possible: their weights are still held."""
        now = ctx.table.step
        # A checkpoint has the last max_staleness + 1 versions of the policy, but only the newest one of an EMA.
        kept = 0 if ctx.config.trainer.ema_decay is not None else ctx.config.max_staleness
        due = self._lacking(ctx.config, *range(now + 1))
        possible = [version for version in due if version >= now - kept or version in self.held]
        if impossible := sorted(set(due) - set(possible)):
            logger.warning(
                "versions %s were being evaluated when their attempt ended; their weights are gone", impossible
            )
        return possible

    def _lacking(self, config: Config, *versions: int) -> list[int]:
        return [v for v in versions if evaluation_due(config, v) and not self.records.known(v)]

    async def _save(self, ctx: Context, version: int) -> None:
        await ctx.work.until(lambda: version in ctx.table.published)
        await self.checkpoints.save(ctx, version)
        self.checkpoints.last = ctx.observer.now()

    def abandon(self) -> None:
        self.evaluations.cancel()
        self.checkpoints.abandon()

    def _timing(self, ctx: Context, seconds: float) -> dict[str, float]:
        before, self._stalled = self._stalled, stalled(ctx)
        shares = {
            f"pool/{pool}/busy": states["busy"] / max(sum(states.values()), 1e-9)
            for pool, states in self.pools.lap().items()
        }
        activation = ctx.activation / max(1, len(ctx.rollout.workers))
        timing = {"timing/step": seconds, "timing/publish": self._stalled - before, "timing/activate": activation}
        memory = {f"memory/{pool}": size / 2**30 for pool, size in ctx.observer.memory.items()}
        line = timing | shares | memory | {"pool/rollout/swaps": ctx.swaps}
        ctx.swaps, ctx.activation = 0, 0.0
        return line

    def _warn(self, ctx: Context, line: dict[str, float]) -> None:
        """Logs each kind of warning about the updates (algorithms/diagnostics.py) once per attempt."""
        self.flat = self.flat + 1 if line.get("zero_std_ratio") == 1.0 else 0
        if self.flat >= FLAT_STEPS and "flat" not in ctx.warned:
            ctx.warned["flat"] = ""
            logger.warning("step %d: %s", line["step"], FLAT.format(steps=self.flat))
        for term, sentence in ctx.reward_calls.warnings().items():
            if term not in ctx.warned:
                ctx.warned[term] = ""
                logger.warning("step %d: %s", line["step"], sentence)
        kept = sum(value for key, value in line.items() if key.startswith("kept/"))
        total = sum(value for key, value in line.items() if key.startswith("kept_of/"))
        clip = clip_of_means(ctx.config.algorithm, self.latent_elements)
        share, elements = kept / total if total else 1.0, self.latent_elements
        guidance = ctx.config.rollout.true_cfg_scale
        for sentence in warnings(
            line, correction=self.correction, kept=share, clip=clip, elements=elements, guidance=guidance
        ):
            kind = re.sub(r"[\d.]+(e[+-]\d+)?", "", sentence)
            if kind not in ctx.warned:
                ctx.warned[kind] = f"step {line['step']:.0f}: {sentence}"
                logger.warning("%s", ctx.warned[kind])


def stalled(ctx: Context) -> float:
    """Returns the seconds that the trainer has waited so far for the staging (copying aside) of versions."""
    return float(ctx.weights.report()["trainer_stall_seconds"])
