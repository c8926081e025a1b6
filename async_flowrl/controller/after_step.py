"""The work around training, off the critical path: metrics, evaluation, pictures and checkpoints after every step."""

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path

from async_flowrl.algorithms.diagnostics import clip_of_means, warnings
from async_flowrl.algorithms.registry import resolve_correction
from async_flowrl.config.schema import Config
from async_flowrl.controller.checkpoints import Checkpoints
from async_flowrl.controller.context import Context
from async_flowrl.controller.evaluation import EvaluationResult, Evaluations
from async_flowrl.observability.images import write_grid
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.run_directory import RunDirectory

logger = logging.getLogger(__name__)

MEASURED = (
    *("reward/mean", "reward/std", "zero_std_ratio", "staleness/mean", "staleness/max"),
    *("loss", "grad_norm", "lr", "ratio/mean", "clip_fraction", "kl", "log_prob_gap"),
)
"""Keys that every line of metrics.jsonl has: null where the algorithm does not measure them or nothing was trained."""


@dataclass
class AfterStep:
    """Implements the controller's `Steps` protocol (context.py)."""

    directory: RunDirectory
    metrics: MetricsLog
    monitor: Monitor
    checkpoints: Checkpoints
    pools: PoolLedger
    latent_elements: int
    """Numbers in the latents of one image."""
    failures: list[str]
    """What went wrong beside the training, a sentence each: it ends no run."""
    evaluations: Evaluations = field(init=False)
    evaluated: dict[int, EvaluationResult] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    trained: bool = False

    def __post_init__(self) -> None:
        self.evaluations = Evaluations(self.show, self._failed)
        self._step_began = self._stalled = 0.0

    async def before_training(self, ctx: Context) -> None:
        """Checkpoint 0 exists before step 0; evaluations that an earlier attempt left undone are made first.

        All but the one at the end, which waits for the last checkpoint.
        """
        await self._save(ctx, ctx.table.step)
        await self.checkpoints.written()
        for version in self._unevaluated(ctx):
            if version < ctx.config.total_steps:
                await self.evaluations.start(ctx, version)
        self._step_began, self._stalled = ctx.observer.now(), stalled(ctx)
        self.pools.lap()

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        began, self._step_began = self._step_began, ctx.observer.now()
        seconds = self._step_began - began
        ctx.observer.event("step", step=step, started=began, ended=self._step_began)
        line = stats | self._timing(ctx, seconds) | {"images_per_s": stats["images"] / max(seconds, 1e-9)}
        self._warn(ctx, line)
        self.metrics.append(step, dict.fromkeys(MEASURED) | line | self._evaluation_keys(step))
        self.monitor.log(step, line)
        self.evaluations.check()
        await self.checkpoints.check()
        version = step + 1
        if self.checkpoints.due(version):
            await self._save(ctx, version)
        if version < ctx.config.total_steps and evaluation_due(ctx.config, version):
            await self.evaluations.start(ctx, version)

    async def drain(self, ctx: Context) -> None:
        """A checkpoint of where the run ended, whose error counts too, and then what is left of evaluations."""
        await ctx.work.until(lambda: ctx.table.step in ctx.table.published)
        await self.checkpoints.insist(ctx.table, ctx.table.step)
        self.trained = True
        if ctx.table.step == ctx.config.total_steps and self._lacking(ctx.config, ctx.config.total_steps):
            await self.evaluations.start(ctx, ctx.config.total_steps)
        await self.evaluations.drain()

    def _failed(self, what: str, error: object) -> None:
        sentence = f"{what}: {error}"
        self.failures.append(sentence)
        logger.warning("%s", sentence)

    def _unevaluated(self, ctx: Context) -> list[int]:
        """Versions up to the one that this attempt begins with whose evaluation is due and not recorded.

        Versions whose weights are gone get none: the policy's last max_staleness + 1 are there, and one of an EMA.
        """
        now = ctx.table.step
        kept = 0 if ctx.config.trainer.ema_decay is not None else ctx.config.max_staleness
        due = self._lacking(ctx.config, *range(now + 1))
        if lost := [version for version in due if version < now - kept]:
            logger.warning("versions %s were being evaluated when their attempt ended; their weights are gone", lost)
        return [version for version in due if version >= now - kept]

    def _lacking(self, config: Config, *versions: int) -> list[int]:
        """Those of the versions whose evaluation is due and not recorded."""
        recorded = {line["step"]: line for line in self.metrics.read()}

        def known(version: int) -> bool:
            prefix = "evaluation_before/" if version == 0 else "evaluation/"
            return any(key.startswith(prefix) for key in recorded.get(max(0, version - 1), ()))

        return [version for version in versions if evaluation_due(config, version) and not known(version)]

    async def _save(self, ctx: Context, version: int) -> None:
        """A checkpoint names the digest of the version it stands at, so that version is sealed first."""
        await ctx.work.until(lambda: version in ctx.table.published)
        await self.checkpoints.save(ctx.table, version)

    def abandon(self) -> None:
        """Ends what is still outstanding after the loop, by success or failure."""
        self.evaluations.cancel()
        self.checkpoints.abandon()

    def show(self, result: EvaluationResult) -> None:
        """Called in a thread when an evaluation is complete: its means join the line of the step before it."""
        what = f"evaluation of version {result.version}"
        if result.unscored:
            self._failed(what, f"{result.unscored} of {result.unscored + len(result.scores)} prompts have no score")
        if not result.scores:
            return
        self.evaluated[result.version] = result
        step = max(0, result.version - 1)
        self.metrics.amend(step, self._evaluation_keys(step))
        self.monitor.evaluation(result.version, {f"{name}/mean": mean for name, mean in result.means().items()})
        try:
            self.monitor.image(self._picture(result), result.version)
        except Exception as error:  # whatever it was: a picture ends no run
            self._failed(f"picture of the {what}", f"{type(error).__name__}: {error}")

    def _picture(self, result: EvaluationResult) -> Path:
        path = self.directory.images / f"step_{result.version:06d}.png"
        write_grid(
            path,
            [prompt.text for prompt in result.prompts],
            result.images,
            [scores.total for scores in result.scores],
            title=f"policy version {result.version}, mean reward {result.means()['reward']:.3f}",
        )
        return path

    def _timing(self, ctx: Context, seconds: float) -> dict[str, float]:
        """Seconds of the step, seconds in which the trainer waited for staging, and each pool's share of busy time."""
        before, self._stalled = self._stalled, stalled(ctx)
        shares = {
            f"pool/{pool}/busy": states["busy"] / max(sum(states.values()), 1e-9)
            for pool, states in self.pools.lap().items()
        }
        return {"timing/step": seconds, "timing/publish": self._stalled - before, **shares}

    def _warn(self, ctx: Context, line: dict[str, float]) -> None:
        """Warns once of each way in which updates do less than they seem to."""
        kept = sum(value for key, value in line.items() if key.startswith("kept/"))
        total = sum(value for key, value in line.items() if key.startswith("kept_of/"))
        correction = resolve_correction(ctx.config.algorithm, ctx.config.max_staleness)
        clip = clip_of_means(ctx.config.algorithm, self.latent_elements)
        for sentence in warnings(line, correction=correction, kept=kept / total if total else 1.0, clip=clip):
            kind = re.sub(r"[\d.]+(e[+-]\d+)?", "", sentence)
            if kind not in self.warned:
                self.warned.add(kind)
                logger.warning("step %d: %s", line["step"], sentence)

    def _evaluation_keys(self, step: int) -> dict[str, float]:
        keys: dict[str, float] = {}
        if step == 0 and 0 in self.evaluated:
            keys |= {f"evaluation_before/{name}/mean": x for name, x in self.evaluated[0].means().items()}
        if step + 1 in self.evaluated:
            keys |= {f"evaluation/{name}/mean": x for name, x in self.evaluated[step + 1].means().items()}
        return keys


def evaluation_due(config: Config, version: int) -> bool:
    """Before training if asked, every so many steps, and at the end."""
    if version == 0:
        return config.evaluate.before_training
    every = config.evaluate.every
    return version == config.total_steps or (every > 0 and version % every == 0)


def stalled(ctx: Context) -> float:
    """Seconds in which the trainer has waited for staging so far."""
    return float(ctx.weights.report()["trainer_stall_seconds"])
