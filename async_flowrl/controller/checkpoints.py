"""Checkpoints on the controller's side: when one is due, the controller's part of it, and the choice of one to resume.

training/checkpoint.py describes the files. AfterStep (after_step.py) uses Checkpoints; run/job.py and run/recovery.py
use `find_resume` and the functions below it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.curves import best_curve, evaluation_due
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.controller.context import Context
from async_flowrl.controller.fingerprint import config_hash, differences, numerics
from async_flowrl.controller.inputs import inputs_of, other_inputs, other_prompts
from async_flowrl.controller.shard_checkpoints import DISK_ERRORS, check_shares, write_shares
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.data.curriculum import UNKNOWN, read_outcomes
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.training.checkpoint import DamagedCheckpoint, find_checkpoint, read_controller, written
from separation.group import Worker, WorkerDied, WorkerFailed
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

MAX_MISSED_CHECKPOINTS = 3
"""Number of checkpoints in a row that could not be written after which the run ends; fewer are only warnings."""
RETRY_SECONDS = 1.0
"""Pause before the writing of the run's last checkpoint is tried again."""


class SaveFailed(RuntimeError):
    """Raised if MAX_MISSED_CHECKPOINTS checkpoints in a row could not be written."""


@dataclass
class Checkpoints:
    """Starts the writing of checkpoints on the first trainer rank that lives, and keeps count of those written."""

    config: Config
    directory: RunDirectory
    trainers: TrainerGroup
    device: str
    """Device of the trainer ranks as torch names it, e.g. `cpu` or `cuda:0`."""
    requests: RequestBuilder = field(kw_only=True)
    base_digest: str = field(kw_only=True)
    """Digest of the base weights that all workers have loaded."""
    spare: Callable[[], Sequence[int]] = field(default=lambda: (), kw_only=True)
    """Returns the versions whose checkpoints must be kept besides the newest checkpoints."""
    misses: int = 0
    """Number of checkpoints in a row that could not be written."""
    saved: list[int] = field(default_factory=list)
    """Versions whose checkpoints are written."""
    _writing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._inputs = inputs_of(self.requests)

    def due(self, version: int) -> bool:
        """Returns True if `version` must have a checkpoint.

        This holds for every `save.every`-th version and for the last one. If the best version is kept (`best_curve`),
        it also holds for every version that is evaluated.
        """
        every = self.config.save.every
        evaluated = best_curve(self.config) is not None and evaluation_due(self.config, version)
        return evaluated or version == self.config.total_steps or (every > 0 and version % every == 0)

    async def insist(self, ctx: Context, version: int) -> None:
        """Writes the last checkpoint of the run, and tries again if that fails, because no later one can replace it.

        Raises SaveFailed after MAX_MISSED_CHECKPOINTS failures in a row, and the errors that `save` raises.
        """
        await self.written()
        while version not in self.saved:
            await self.save(ctx, version)
            await self.written()
            if version not in self.saved:
                await asyncio.sleep(RETRY_SECONDS)

    async def save(self, ctx: Context, version: int) -> None:
        """Starts the checkpoint of `version`, unless it is saved already; returns when the trainer's state is copied.

        The copy is written during the next updates. Only one checkpoint is written at a time, so this call first waits
        for the one before. Raises the errors of `written`, and DeadlineExceeded if the copy takes longer than
        `deadlines.update`.
        """
        await self.written()
        if version in self.saved:
            return
        async with deadline(self.config.deadlines.update, f"update: the trainer's copy for checkpoint {version}"):
            writers = await self._copied(ctx)
        controller = {
            "version": version,
            "published": {str(v): digest for v, digest in ctx.table.published.items()},
            "config_hash": config_hash(self.config),
            "numerics": numerics(self.config, device_type(self.device)),
            "inputs": self._inputs,
            "base_digest": self.base_digest,
            "curriculum": self.requests.curriculum.saved() if self.requests.curriculum else None,
        }
        self._writing = asyncio.create_task(
            self._write(ctx, version, controller, writers), name=f"checkpoint {version}"
        )

    async def written(self) -> None:
        """Waits for the checkpoint that is being written, if there is one.

        A write that fails with one of DISK_ERRORS is logged as a warning. Raises SaveFailed for MAX_MISSED_CHECKPOINTS
        of them in a row, WorkerFailed for other errors, WorkerDied, or DeadlineExceeded after `deadlines.update`.
        """
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def check(self) -> None:
        """Raises the error of a checkpoint whose writing has ended; does not wait for one that is being written."""
        if self._writing is not None and self._writing.done():
            await self.written()

    def abandon(self) -> None:
        """Stops waiting for the checkpoint that is being written; an incomplete one is ignored when a run resumes."""
        if self._writing is not None and not self._writing.cancel() and not self._writing.cancelled():
            self._writing.exception()  # Marks the error as seen: the attempt has already ended for another reason.

    async def _copied(self, ctx: Context) -> list[Worker]:
        """Has ranks copy the present state to host memory, and returns those that may write it, in order.

        These are the first rank and one of another replica, which writes the copy if the first dies. With tune=full
        only the first rank makes a copy, because the node may not have the memory for a second copy of all weights with
        their optimizer. If every rank has a share of the weights, each copies its share, and only the first rank is
        returned.
        """
        living = self.trainers.living
        if self.trainers.sharded:
            await self.trainers.all("snapshot")
            return [living.first]
        while True:
            writers = [living.first, *([] if self.config.tune == FULL else living.heirs[:1])]
            try:
                await together(*(writer.call("snapshot") for writer in writers))
            except WorkerDied as error:
                await living.bury(ctx, error)
            else:
                return writers

    async def _write(self, ctx: Context, version: int, controller: dict[str, Any], writers: Sequence[Worker]) -> None:
        """Has the first living one of the `writers` write its copy, and the others drop theirs.

        Raises SaveFailed, WorkerFailed or DeadlineExceeded, as `written` says.
        """
        lost: WorkerDied | None = None
        for place, writer in enumerate(writers):
            try:
                async with deadline(self.config.deadlines.update, f"update: writing checkpoint {version}"):
                    await self._written_by(writer, controller)
            except WorkerDied as error:
                lost = error
                await self.trainers.living.bury(ctx, error)
                continue
            except WorkerFailed as error:
                if error.kind not in DISK_ERRORS:
                    raise
                self._missed(version, error.message, error)
            else:
                self.misses = 0
                self.saved.append(version)
            for other in writers[place + 1 :]:
                with suppress(WorkerDied):  # the next call to this rank reports its death
                    await other.call("forget_snapshot", lane="save")
            return
        assert lost is not None
        self._missed(version, f"the ranks that had a copy of it died: {lost}", lost)

    async def _written_by(self, writer: Worker, controller: dict[str, Any]) -> None:
        directory, spare = str(self.directory.checkpoints), self.spare()
        if self.trainers.sharded:
            await write_shares(self.trainers.living.workers, directory, controller, self.config.save.keep, spare)
        else:
            await writer.call("save", directory, controller, spare, lane="save")

    def _missed(self, version: int, why: str, error: Exception) -> None:
        """Counts a checkpoint that could not be written. Raises SaveFailed after MAX_MISSED_CHECKPOINTS in a row."""
        self.misses += 1
        logger.warning("checkpoint %d could not be written (%d in a row): %s", version, self.misses, why)
        if self.misses >= MAX_MISSED_CHECKPOINTS:
            raise SaveFailed(f"{self.misses} checkpoints in a row could not be written: {why}") from error


@dataclass(frozen=True)
class Resume:
    """The point from which an attempt goes on: a checkpoint, or the start of the run."""

    path: Path | None
    """Folder of the checkpoint; None means the start of the run."""
    version: int
    controller: dict[str, Any]
    """The controller's part of the checkpoint (controller.json)."""
    forced: tuple[str, ...] = ()
    """Sentences on differences for which a resume is refused unless `resume=force` is set."""
    notes: tuple[str, ...] = ()
    """Phrases on differences that a resume only warns of."""


START = Resume(None, 0, {})
"""The start of a run, without a checkpoint."""


def newest(directory: RunDirectory) -> Resume:
    """Returns the newest undamaged checkpoint of this run, or START if the run has written none.

    Raises DamagedCheckpoint if there are checkpoints and all of them are damaged.
    """
    path = find_checkpoint(directory.checkpoints)
    if path is None:
        if written(directory.checkpoints):
            raise DamagedCheckpoint(f"{directory.checkpoints} holds no sound checkpoint to go on from")
        return START
    return read_resume(path)


def read_resume(path: Path) -> Resume:
    """Reads the checkpoint in the folder `path`. Raises DamagedCheckpoint if a file of it differs from its digest."""
    controller = read_controller(path)
    return Resume(path, int(controller["version"]), controller)


def find_resume(requests: RequestBuilder, directory: RunDirectory) -> Resume:
    """Returns the checkpoint that the setting `resume` names, or START.

    Raises ConfigError if the checkpoint is damaged. Also raises ConfigError if it was made with a configuration that
    leads to other weights or with other training prompts; with resume=force these differences are only noted in
    `Resume.forced`.
    """
    config = requests.config
    if config.resume == "never":
        return START
    own = config.resume in ("auto", "force")
    try:
        resume = newest(directory) if own else read_resume(Path(config.resume).expanduser())
    except DamagedCheckpoint as error:
        raise ConfigError(str(error)) from error
    if resume.path is None:
        return resume
    check_shares(config, resume.path)
    now = inputs_of(requests)
    sentences = []
    if resume.controller["config_hash"] != config_hash(config):
        sentences.append(
            f"{resume.path} was made with a configuration that leads to other weights; compare "
            f"{resume.path.parent.parent / directory.config.name} with yours"
        )
    if prompts := other_prompts(resume.controller["inputs"], now, config.data.train):
        sentences.append(f"{resume.path}: {prompts}")
    if sentences and config.resume != "force":
        raise ConfigError(f"{'; and '.join(sentences)}. resume=force goes on all the same")
    return replace(resume, forced=tuple(sentences), notes=tuple(other_inputs(resume.controller["inputs"], now)))


def check_base_weights(config: Config, resume: Resume, base_digest: str) -> Resume:
    """Compares the digest of the loaded base weights with the checkpoint's; returns `resume` if they are equal.

    Raises ConfigError if they differ; with resume=force the difference is added to `Resume.forced` instead.
    """
    if resume.path is None or resume.controller["base_digest"] == base_digest:
        return resume
    sentence = (
        f"{resume.path} was made on other base weights than model.path={config.model.path} has now: "
        f"{resume.controller['base_digest'][:12]} before, {base_digest[:12]} now"
    )
    if config.resume != "force":
        raise ConfigError(f"{sentence}. resume=force goes on all the same")
    return replace(resume, forced=(*resume.forced, sentence))


def with_outcomes(requests: RequestBuilder, resume: Resume) -> RequestBuilder:
    """Returns the request builder of an attempt from `resume`, with the outcomes of earlier steps for data.curriculum.

    There is one outcome per group of the steps before. All are UNKNOWN if the checkpoint has none for these steps, or
    if it was made with other prompts and resume=force is set.
    """
    if requests.config.data.curriculum.after is None or resume.path is None:
        return replace(requests, outcomes=b"")
    groups = resume.version * requests.config.prompts_per_step
    saved, inputs = resume.controller["curriculum"], resume.controller["inputs"]
    outcomes = read_outcomes(saved) if saved is not None else b""
    if len(outcomes) != groups or inputs["train"] != inputs_of(requests)["train"]:
        outcomes = bytes([UNKNOWN]) * groups
    return replace(requests, outcomes=outcomes)


def warn_of_differences(config: Config, resume: Resume, device: str) -> None:
    """Logs each difference from the checkpoint with which the run goes on nevertheless.

    These are `Resume.forced`, `Resume.notes`, and the settings, packages and device that change only the last bits of
    the weights (`numerics` in fingerprint.py).
    """
    if resume.path is None:
        return
    for sentence in resume.forced:
        logger.warning("resume=force: %s", sentence)
    for phrase in resume.notes:
        logger.warning("resuming from %s, but %s", resume.path, phrase)
    changed = differences(resume.controller["numerics"], numerics(config, device_type(device)))
    if changed:
        logger.warning("resuming, but %s: the last bits of the weights will differ", ", ".join(changed))


def device_type(device: str) -> str:
    """Returns the device without its number, e.g. `cuda` for `cuda:0`, because the number does not change results."""
    return device.partition(":")[0]
