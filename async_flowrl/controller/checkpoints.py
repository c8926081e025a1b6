"""Checkpoints as the controller sees them: when one is due, the controller's part of it, and how a run goes on."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.curves import best_curve, evaluation_due
from async_flowrl.config.schema import FULL, Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.fingerprint import config_hash, differences, numerics
from async_flowrl.controller.inputs import inputs_of, other_inputs, other_prompts
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.data.curriculum import UNKNOWN, read_outcomes
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.training.checkpoint import DamagedCheckpoint, find_checkpoint, read_controller, written
from separation.group import Worker, WorkerDied, WorkerFailed
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

DISK_ERRORS = {"OSError", "PermissionError", "FileNotFoundError", "BlockingIOError", "SafetensorError"}
MAX_MISSED_CHECKPOINTS = 3
"""A checkpoint that cannot be written is a warning; so many in a row end the run."""
RETRY_SECONDS = 1.0
"""Pause before a run's last checkpoint is tried again."""


class SaveFailed(RuntimeError):
    """No checkpoint could be written for too long."""


@dataclass
class Checkpoints:
    config: Config
    directory: RunDirectory
    trainers: TrainerGroup
    device: str
    """Device of the trainer ranks, as they report it: `cpu`, `cuda:0`."""
    requests: RequestBuilder = field(kw_only=True)
    base_digest: str = field(kw_only=True)
    """Of the base weights that all workers have loaded."""
    spare: Callable[[], Sequence[int]] = field(default=lambda: (), kw_only=True)
    """Versions whose checkpoints are kept besides the newest."""
    misses: int = 0
    saved: list[int] = field(default_factory=list)
    _writing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._inputs = inputs_of(self.requests)

    def due(self, version: int) -> bool:
        every = self.config.save.every
        evaluated = best_curve(self.config) is not None and evaluation_due(self.config, version)
        return evaluated or version == self.config.total_steps or (every > 0 and version % every == 0)

    async def insist(self, ctx: Context, version: int) -> None:
        """The last checkpoint of a run: no later one replaces it. Raises SaveFailed after MAX_MISSED_CHECKPOINTS."""
        await self.written()
        while version not in self.saved:
            await self.save(ctx, version)
            await self.written()
            if version not in self.saved:
                await asyncio.sleep(RETRY_SECONDS)

    async def save(self, ctx: Context, version: int) -> None:
        """Copies the trainer's state (the trainer waits for that); it is written beside the next updates.

        One is written at a time. Raises what went wrong with the one before.
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
        """Waits for the checkpoint that is being written, if one is. Raises WorkerDied, WorkerFailed, SaveFailed."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def check(self) -> None:
        """Raises what went wrong with a checkpoint, without waiting for one that is still being written."""
        if self._writing is not None and self._writing.done():
            await self.written()

    def abandon(self) -> None:
        """Waits no longer; what the worker still writes is whole or does not count."""
        if self._writing is not None and not self._writing.cancel() and not self._writing.cancelled():
            self._writing.exception()  # Whatever it is, the attempt has ended by something else.

    async def _copied(self, ctx: Context) -> list[Worker]:
        """The ranks that hold a copy of the present state: the first, which writes it, and the next one, which does if
        the first dies.

        With tune=full the first alone: a copy of whole weights with their optimizer is host memory that a second rank
        of the same node may not have.
        """
        living = self.trainers.living
        while True:
            writers = [living.first, *([] if self.config.tune == FULL else living.others[:1])]
            try:
                await together(*(writer.call("snapshot") for writer in writers))
            except WorkerDied as error:
                await living.bury(ctx, error)
            else:
                return writers

    async def _write(self, ctx: Context, version: int, controller: dict[str, Any], writers: Sequence[Worker]) -> None:
        """Has the first of the writers that lives write its copy, and the others drop theirs."""
        lost: WorkerDied | None = None
        for place, writer in enumerate(writers):
            try:
                async with deadline(self.config.deadlines.update, f"update: writing checkpoint {version}"):
                    await writer.call("save", str(self.directory.checkpoints), controller, self.spare(), lane="save")
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
                with suppress(WorkerDied):  # the next call to it shows that
                    await other.call("forget_snapshot", lane="save")
            return
        assert lost is not None
        self._missed(version, f"the ranks that had a copy of it died: {lost}", lost)

    def _missed(self, version: int, why: str, error: Exception) -> None:
        """Counts a checkpoint that does not exist. Raises SaveFailed for one too many in a row."""
        self.misses += 1
        logger.warning("checkpoint %d could not be written (%d in a row): %s", version, self.misses, why)
        if self.misses >= MAX_MISSED_CHECKPOINTS:
            raise SaveFailed(f"{self.misses} checkpoints in a row could not be written: {why}") from error


@dataclass(frozen=True)
class Resume:
    """Where a run goes on: `path` is None for a fresh start."""

    path: Path | None
    version: int
    controller: dict[str, Any]
    forced: tuple[str, ...] = ()
    """What resume=force went over, a sentence each."""
    notes: tuple[str, ...] = ()
    """What differs and is no reason to refuse, a phrase each."""


START = Resume(None, 0, {})


def newest(directory: RunDirectory) -> Resume:
    """The newest sound checkpoint of this run; its start, if it has not written any.

    Raises DamagedCheckpoint if all that it has written are damaged.
    """
    path = find_checkpoint(directory.checkpoints)
    if path is None:
        if written(directory.checkpoints):
            raise DamagedCheckpoint(f"{directory.checkpoints} holds no sound checkpoint to go on from")
        return START
    return read_resume(path)


def read_resume(path: Path) -> Resume:
    """Raises DamagedCheckpoint."""
    controller = read_controller(path)
    return Resume(path, int(controller["version"]), controller)


def find_resume(requests: RequestBuilder, directory: RunDirectory) -> Resume:
    """The checkpoint that `resume` names.

    Raises ConfigError for a damaged one, and for one of another configuration or of other training prompts, which
    resume=force goes over with a warning.
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
    """Raises ConfigError where the loaded base weights are not the checkpoint's; resume=force notes that instead."""
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
    """The request builder of an attempt that goes on from `resume`, with what data.curriculum knows of earlier steps.

    Of steps with other prompts, which resume=force has let pass, nothing is known.
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
    """Says what is not as the checkpoint has it and was let pass: by resume=force, or because it only decides the last
    bits of the weights (the trainer's device too), or because nobody can say what it changes.
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
    """`cuda` for `cuda:0`: which of several equal devices it was changes nothing."""
    return device.partition(":")[0]
