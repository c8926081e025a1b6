"""Evaluations: images of the evaluation prompts, made and scored between training tickets while training goes on.

An evaluation has tickets of its own kind. Each rollout worker holds the evaluated version in a separate slot.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from async_flowrl.config.curves import best_curve, evaluation_due
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import make_again
from async_flowrl.controller.resume import reward_sources
from async_flowrl.controller.step_metrics import extra_means
from async_flowrl.observability.evaluations import (
    DIVERSITY,
    HELD_OUT,
    TRAINED,
    Curve,
    Evaluation,
    EvaluationLog,
    metric_keys,
)
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.hacking import alarms, best, newest_alarms, notices
from async_flowrl.observability.images import picture_data, write_grid, write_images, write_sources
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.statistics import diversity
from async_flowrl.tickets.table import State, Ticket, describe
from async_flowrl.types import ByteArray, Prompt, RolloutRequest, Sampling, Scores, identity
from separation.group import RefLost
from separation.supervise import deadline


@dataclass(frozen=True)
class EvaluationResult:
    """The result of one evaluation; `prompts`, `images` (uint8 [n, H, W, 3]) and `scores` are per scored prompt."""

    version: int  # The evaluated policy version; for the baseline, the version at which it was evaluated.
    prompts: tuple[Prompt, ...]
    images: tuple[ByteArray, ...]
    scores: tuple[Scores, ...]
    # Number of prompts without scores, which are left out of `prompts`, `images`, `scores` and `indices`.
    unscored: int = 0
    indices: tuple[int, ...] = ()  # Index of each scored prompt among all evaluation prompts.
    # Index of a prompt → its scores by held-out terms, also for prompts that the trained reward has not scored.
    held_out: Mapping[int, Scores] = field(default_factory=dict)
    sampling: Sampling | None = None  # Sampling of the first prompt's images.
    setting: str = ""  # Digest of prompts, initial noises and sampling (`setting_of`).
    baseline: bool = False  # True: the base model was evaluated, with its family's usual sampling instead of the run's.

    @property
    def title(self) -> str:
        return "the baseline" if self.baseline else f"version {self.version}"


@dataclass
class Evaluations:
    """Runs evaluations one after another in background tasks; training does not wait for them."""

    report: Callable[[EvaluationResult], None]  # Called in a thread with the result of each complete evaluation.
    # Called with the name of an evaluation that failed after training, and its error.
    failed: Callable[[str, object], None]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, ctx: Context, version: int, *, baselines: Sequence[bool] = (False,)) -> None:
        """Retains `version` (or the EMA) and starts an evaluation per item of `baselines` (True: the base model)."""
        await ctx.weights.retain_for_evaluation(version)
        evaluating = self._run(ctx, version, baselines)
        self.tasks.append(asyncio.create_task(evaluating, name=f"evaluation of version {version}"))

    async def drain(self) -> None:
        for task in self.tasks:
            try:
                await task
            except Exception as error:  # no error here may cost the trained weights
                self.failed(task.get_name(), f"{type(error).__name__}: {error}")
        self.tasks.clear()

    def check(self) -> None:
        """Raises the error of an evaluation that failed during training, because its tickets block the next one."""
        for task in self.tasks:
            if task.done():
                task.result()
        self.tasks = [task for task in self.tasks if not task.done()]

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def _run(self, ctx: Context, version: int, baselines: Sequence[bool]) -> None:
        async with self.turn:
            await ctx.weights.deliver_for_evaluation(version)
            count = len(ctx.requests.evaluation)
            for baseline in baselines:
                tickets = ctx.table.issue_evaluation(version=version, step=version, groups=count, baseline=baseline)
                ctx.work.notify()
                result = await collect(ctx, tickets, version)
                ctx.table.close_evaluation()
                # Within the lock: an evaluation is compared with those reported before it.
                await asyncio.to_thread(self.report, result)


async def collect(ctx: Context, tickets: list[Ticket], version: int) -> EvaluationResult:
    """Waits until all tickets are scored, fetches their images (lost ones are made again) and returns the result.

    Raises DeadlineExceeded if fetching an image takes too long.
    """
    images: dict[int, ByteArray] = {}
    while len(images) < len(tickets):
        await ctx.ready.until(lambda: all(ticket.state is State.READY for ticket in tickets))
        for ticket in tickets:
            if ticket.ordinal not in images:
                try:
                    async with deadline(ctx.config.deadlines.generate, f"generate: images of {describe(ticket)}"):
                        images[ticket.ordinal] = await ctx.rollout.fetch(ticket.payload.images)
                except RefLost as lost:
                    make_again(ctx, [ticket], lost)
    scored = [ticket for ticket in tickets if ticket.scores is not None]
    requests = [ctx.requests.request(ticket) for ticket in tickets]
    return EvaluationResult(
        version,
        prompts=tuple(ctx.requests.prompt(ticket) for ticket in scored),
        images=tuple(images[ticket.ordinal] for ticket in scored),
        scores=tuple(ticket.scores for ticket in scored),
        unscored=len(tickets) - len(scored),
        indices=tuple(ticket.group for ticket in scored),
        held_out={ticket.group: ticket.held_out for ticket in tickets if ticket.held_out is not None},
        sampling=requests[0].sampling,
        setting=setting_of(requests),
        baseline=tickets[0].baseline,
    )


def setting_of(requests: Sequence[RolloutRequest]) -> str:
    """Returns a digest (16 hex digits of SHA-256) of all that the images depend on besides the weights."""
    others = ("system", "negative", "target")
    values = [
        (asdict(r.sampling), r.initial_seeds, identity(r.prompt.wording), *(getattr(r.prompt, name) for name in others))
        for r in requests
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


logger = logging.getLogger(__name__)


def step_of(version: int) -> int:
    """Returns the training step whose line of metrics has the evaluation of a version."""
    return max(0, version - 1)


def with_prefix(record: Evaluation, keys: Mapping[str, float]) -> dict[str, float]:
    prefix = "evaluation_baseline" if record.baseline else "evaluation" if record.version else "evaluation_before"
    return {f"{prefix}/{key}": value for key, value in keys.items()}


@dataclass
class EvaluationRecords:
    """Writes evaluations in the order in which they are complete; AfterStep (after_step.py) uses it."""

    config: Config
    directory: RunDirectory
    metrics: MetricsLog
    monitor: Monitor
    log: EvaluationLog
    observer: EventLog
    failures: list[str]  # Sentences on failures outside the training. They do not end the run; summary.json lists them.
    # Called with a reason to ask the run to end after the current step.
    stop: Callable[[str], None] = lambda reason: None

    def __post_init__(self) -> None:
        records = self.log.records
        held_out = reward_sources(self.config.evaluate.reward.terms)
        # Read now, as a file may be edited after the workers have loaded it.
        self._sources = reward_sources(self.config.reward.terms) | held_out
        self._told = {alarm.curve for alarm in alarms(records)} | ({DIVERSITY} if notices(records) else set())

    def known(self, version: int) -> bool:
        return self.log.policy(version) is not None

    def spare(self) -> list[int]:
        """Returns the versions whose checkpoints must be kept: the best one so far, and those not evaluated yet."""
        curve = best_curve(self.config)
        if curve is None:
            return []
        history = self.log.records
        newest = max((e.version for e in history if not e.baseline), default=-1)
        chosen = best(history, curve)
        waiting = [v for v in range(newest + 1, self.config.total_steps + 1) if evaluation_due(self.config, v)]
        return ([chosen.version] if chosen else []) + waiting

    def metric_keys(self, step: int) -> dict[str, float]:
        """Returns the metrics of version `step` + 1; at step 0 also those of version 0 and of the baseline."""
        if step > 0 and not evaluation_due(self.config, step + 1):
            return {}
        keys, records = dict[str, float](), self.log.records
        for place, record in enumerate(records):
            if step_of(record.version) == step:
                keys |= with_prefix(record, metric_keys(record, records[:place]))
        return keys

    def show(self, result: EvaluationResult) -> None:
        """Writes a complete evaluation; called in a thread. A picture that cannot be made is recorded as a failure."""
        what = f"evaluation of {result.title}"
        self._name_failures(what, result)
        record = record_of(self.config, result, self._sources)
        if not record.curves:
            return
        keys = metric_keys(record, self.log.records)
        # An evaluation with a record is not made again after a kill, so its keys are there first. If the step's line is
        # not written yet, `AfterStep` adds the keys of the record; if it was written in between, they are added again.
        step = step_of(result.version)
        self.metrics.amend(step, with_prefix(record, keys))
        self.log.add(record)
        self.metrics.amend(step, with_prefix(record, keys))
        if not record.baseline:
            self._watch_for_hacking()
        self.monitor.evaluation(
            result.version, {f"baseline/{k}": v for k, v in keys.items()} if result.baseline else keys
        )
        if result.scores:
            try:
                self.monitor.image(self._picture(result, keys.get("reward/mean")), result.version)
                if not result.baseline:
                    self.monitor.samples(result.version, result.prompts, result.images, result.scores)
            except Exception as error:  # a picture must not end a run
                self.failed(f"picture of the {what}", f"{type(error).__name__}: {error}")

    def failed(self, what: str, error: object) -> None:
        sentence = f"{what}: {error}"
        self.failures.append(sentence)
        logger.warning("%s", sentence)

    def _name_failures(self, what: str, result: EvaluationResult) -> None:
        if result.unscored:
            self.failed(what, f"{result.unscored} of {result.unscored + len(result.scores)} prompts have no score")
        optional = Counter(name for each in result.scores for name in each.failed)
        for name, count in optional.items():
            self.failed(what, f"the term {name}, which is not required, has no score for {count} prompts")
        messages: dict[str, list[str]] = {}
        for scores in result.held_out.values():
            for name, failure in scores.failed.items():
                messages.setdefault(name, []).append(failure.reason)
        for name, each in messages.items():
            self.failed(
                what, f"held-out {name} has no score for {len(each)} of {len(result.held_out)} prompts: {each[0]}"
            )

    def _watch_for_hacking(self) -> None:
        """Logs reward hacking and loss of diversity, once per curve; with on_hacking=stop, an alarm ends the run."""
        action, history = self.config.evaluate.on_hacking, self.log.records
        for notice in notices(history):
            self._tell(DIVERSITY, notice.sentence)
        if action == "ignore":
            return
        for alarm in newest_alarms(history):
            self.observer.event("hacking", curve=alarm.curve, version=alarm.version, since=alarm.since)
            self._tell(alarm.curve, alarm.sentence)
            if action == "stop":
                self.stop(f"evaluate.on_hacking=stop at version {alarm.version}")

    def _tell(self, curve: str, sentence: str) -> None:
        if curve not in self._told:
            self._told.add(curve)
            logger.warning("%s", sentence)

    def _picture(self, result: EvaluationResult, mean: float | None) -> Path:
        name = "baseline" if result.baseline else f"step_{result.version:06d}"
        path = self.directory.images / f"{name}.png"
        shown = with_held_out_extras(result)
        kept = self.config.monitor
        if kept.kept_images > 0:
            by_index = dict(zip(result.indices, result.images, strict=True))
            details = picture_data(result.prompts, shown)
            for prompt, detail in zip(result.prompts, details, strict=True):
                if prompt.images:
                    detail["sources"] = write_sources(self.directory.images, prompt.images, kept.kept_side)
            write_images(path.with_suffix(""), by_index, details, most=kept.kept_images, side=kept.kept_side)
        write_grid(
            path,
            [prompt.text for prompt in result.prompts],
            result.images,
            shown,
            title=f"policy {result.title}" + (f", mean reward {mean:.3f}" if mean is not None else ""),
            sources=[prompt.images for prompt in result.prompts],
        )
        return path


def with_held_out_extras(result: EvaluationResult) -> list[Scores]:
    """Returns the scores of all prompts with the extras of the held-out terms beside those of the trained ones."""
    return [
        replace(scores, extras={**scores.extras, **result.held_out[index].extras})
        if index in result.held_out
        else scores
        for index, scores in zip(result.indices, result.scores, strict=True)
    ]


def record_of(config: Config, result: EvaluationResult, files: Mapping[str, str]) -> Evaluation:
    """Returns the record of a result, without curves that have no score; `files`: digests by `reward_sources`."""
    scored = list(zip(result.indices, result.scores, strict=True))
    terms, held_out = config.reward.terms, config.evaluate.reward.terms
    summed = {name for name, term in terms.items() if term.weight}
    whole = {index: tuple(s.total) for index, s in scored if summed <= s.by_term.keys()}
    curves = {"reward": Curve(TRAINED, 1.0, _source(terms, files), whole)}
    for name, term in terms.items():
        values = {index: tuple(s.by_term[name]) for index, s in scored if name in s.by_term}
        curves[name] = Curve(TRAINED, term.weight, _source({name: term}, files), values)
    for name, term in held_out.items():
        values = {index: tuple(s.by_term[name]) for index, s in result.held_out.items() if name in s.by_term}
        curves[name] = Curve(HELD_OUT, term.weight, _source({name: term}, files), values)
    for name in sorted({name for scores in result.held_out.values() for name in scores.distances}):
        apart = {index: (s.distances[name],) for index, s in result.held_out.items() if name in s.distances}
        curves[f"{DIVERSITY}_{name}"] = Curve(DIVERSITY, 0.0, curves[name].source, apart)
    distances = {index: diversity(images) for index, images in zip(result.indices, result.images, strict=True)}
    measured = {index: (distance,) for index, distance in distances.items() if distance is not None}
    curves["diversity"] = Curve(DIVERSITY, 0.0, "pixels", measured)
    sampling = result.sampling
    assert sampling is not None
    return Evaluation(
        result.version,
        result.baseline,
        result.setting,
        steps=sampling.num_inference_steps,
        guidance=max(sampling.true_cfg_scale, sampling.guidance_scale),
        curves={name: curve for name, curve in curves.items() if curve.scores},
        extras=extra_means(scores.extras for scores in result.held_out.values()),
    )


def _source(terms: Mapping[str, RewardTerm], files: Mapping[str, str]) -> str:
    """Returns a digest (16 hex digits) of all that the scores depend on besides the images."""
    values = [
        (asdict(term)["weight"] if len(terms) > 1 else 1.0, term.name or key, term.options)
        + ((files[key],) if key in files else ())
        for key, term in terms.items()
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]
