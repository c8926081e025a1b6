"""The point from which an attempt goes on: which checkpoint, and what differs between it and the run now."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.check import ConfigError
from async_flowrl.config.error_text import as_written
from async_flowrl.config.own_code import source_of
from async_flowrl.config.paths import expanded
from async_flowrl.config.schema import Config, RewardTerm, ServeConfig
from async_flowrl.config.settings import ROUNDING, WEIGHTS, rule_of, settings
from async_flowrl.controller.kept_state import KeptState
from async_flowrl.data.sampler import UNKNOWN, read_outcomes
from async_flowrl.data.store import digest_of
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rewards.served import command_of
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.training.checkpoint import (
    TRAINER,
    DamagedCheckpoint,
    check_ranks,
    find_checkpoint,
    held_versions_of,
    read_controller,
    verify_checkpoint,
    written,
)

logger = logging.getLogger(__name__)


# Beginnings of the differences with which a checkpoint's tensors have other shapes, or some are lacking.
UNFIT = (
    *("tune ", "full.", "lora.rank ", "lora.targets ", "model.family ", "model.tiny."),
    *("trainer.ema_decay was null", "algorithm.old_policy_decay was copy", "algorithm.average_decay was null"),
    "algorithm.reference_every was null",
)


@dataclass(frozen=True)
class Resume:
    """The point from which an attempt goes on: a checkpoint, or the start of the run."""

    path: Path | None  # Folder of the checkpoint; None means the start of the run.
    version: int
    controller: dict[str, Any]  # The controller's part of the checkpoint (controller.json).
    forced: tuple[str, ...] = ()  # Sentences on differences for which a resume is refused unless `resume=force` is set.
    notes: tuple[str, ...] = ()  # Phrases on differences that a resume only warns of.
    kept: KeptState | None = None  # State that the controller holds, in place of a checkpoint.
    # Streams and versions, besides those that every checkpoint has, whose weights are there for their evaluations.
    held: frozenset[tuple[str, int]] = frozenset()

    @property
    def held_versions(self) -> frozenset[int]:
        return frozenset(version for _, version in self.held)


START = Resume(None, 0, {})  # The start of a run, without a checkpoint.


def newest(directory: RunDirectory, *, shares: bool = False) -> Resume:
    """Returns the newest undamaged checkpoint, or START; with `shares` also the ranks' shares are read and checked.

    Raises DamagedCheckpoint if there are checkpoints and all of them are damaged.
    """
    path = find_checkpoint(directory.checkpoints, shares=shares)
    if path is None:
        if written(directory.checkpoints):
            raise DamagedCheckpoint(
                f"{directory.checkpoints} holds no sound checkpoint to go on from; another output_dir begins anew"
            )
        return START
    return _read_resume(path)


def _read_resume(path: Path) -> Resume:
    controller = read_controller(path)
    return Resume(path, int(controller["version"]), controller, held=held_versions_of(path))


def find_resume(requests: RequestBuilder, directory: RunDirectory, *, shares: bool = False) -> Resume:
    """Returns the checkpoint that the setting `resume` names, or START; `shares` as for `newest`.

    Raises ConfigError if it is damaged or was made with settings or prompts that lead to other weights; with
    resume=force they are only noted in `Resume.forced`, unless the weights do not fit.
    """
    config = requests.config
    if config.resume == "never":
        return START
    of_this_run = config.resume in ("auto", "force")
    try:
        if of_this_run:
            resume = newest(directory, shares=shares)
        else:
            path = expanded(config.resume)
            verify_checkpoint(path, shares=shares)
            resume = _read_resume(path)
    except DamagedCheckpoint as error:
        hint = "" if of_this_run else _instead_of(expanded(config.resume), shares=shares)
        raise ConfigError(f"{error}{hint}") from error
    if resume.path is None:
        return resume
    check_shares(config, resume.path)
    now = inputs_of(requests)
    others = differences(resume.controller["deciding"], deciding(config))
    prompts = other_prompts(resume.controller["inputs"], now, config.data.train)
    unfit = any(phrase.startswith(UNFIT) for phrase in others)
    differing = [*others, *([prompts] if prompts else [])]
    if differing and (config.resume != "force" or unfit):
        ends = "its weights do not fit, so nothing can go on from it" if unfit else "resume=force goes on all the same"
        raise ConfigError(
            "\n  ".join([f"{resume.path} was made with settings that lead to other weights:", *differing, ends])
        )
    forced = tuple(f"{resume.path}: {each}" for each in differing)
    return replace(resume, forced=forced, notes=tuple(other_inputs(resume.controller["inputs"], now)))


def _instead_of(path: Path, *, shares: bool) -> str:
    if (checkpoints := RunDirectory(path).checkpoints).is_dir():
        return f"; it is a run, whose checkpoints are {checkpoints}/step_N"
    for other in written(path) or written(path.parent):
        with suppress(DamagedCheckpoint):
            if other != path:
                verify_checkpoint(other, shares=shares)
                return f"; try resume={other}"
    return ""


def check_shares(config: Config, path: Path) -> None:
    """Raises ConfigError if the ranks that wrote a checkpoint shared the weights in another way than these will."""
    if not tuning_of(config).whole or config.layout_is_open:
        return  # Where shard=auto is still open, the ranks look themselves.
    ranks = config.trainer.num_workers if config.in_shares else None
    try:
        check_ranks(path, json.loads((path / TRAINER).read_text()), ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_model(config: Config, resume: Resume, info: Mapping[str, Any]) -> Resume:
    """Compares digests of base and schedules with the checkpoint's; returns `resume`, forced ones noted.

    `info` is what a rank reported when it loaded the model. Raises ConfigError if they differ without resume=force.
    """
    kinds = {"base_digest": "base weights", "schedules": "noise levels (scheduler_config.json, or diffusers)"}
    for key, what in kinds.items() if resume.path is not None else ():
        before, now = str(resume.controller.get(key, "none")), str(info[key])
        if before != now:
            sentence = (
                f"{resume.path} was made with other {what} than model.path={config.model.path} has now: "
                f"{before[:12]} before, {now[:12]} now"
            )
            if config.resume != "force":
                raise ConfigError(f"{sentence}. resume=force goes on all the same")
            resume = replace(resume, forced=(*resume.forced, sentence))
    return resume


def with_outcomes(requests: RequestBuilder, resume: Resume) -> RequestBuilder:
    """Returns an attempt's request builder, with the outcomes of earlier groups (or UNKNOWN) for data.curriculum."""
    if requests.config.data.curriculum.after is None or (resume.path is None and resume.kept is None):
        return replace(requests, outcomes=b"")
    groups = resume.version * requests.config.prompts_per_step
    saved, inputs = resume.controller["curriculum"], resume.controller["inputs"]
    outcomes = read_outcomes(saved) if saved is not None else b""
    if len(outcomes) != groups or inputs["train"] != inputs_of(requests)["train"]:
        outcomes = bytes([UNKNOWN]) * groups
    return replace(requests, outcomes=outcomes)


def warn_of_differences(config: Config, resume: Resume, device: str) -> None:
    """Logs each difference from the checkpoint with which the run goes on: forced ones, notes, and `numerics`."""
    if resume.path is None:
        return
    for sentence in resume.forced:
        logger.warning("resume=force: %s", sentence)
    for phrase in resume.notes:
        logger.warning("resuming from %s, but %s", resume.path, phrase)
    changed = differences(resume.controller["numerics"], numerics(config, device_type(device)))
    if changed:
        logger.warning("resuming, but %s: the last bits of the weights will differ", ", ".join(changed))


_PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy")
_ENGINE_PACKAGES = ("vllm", "vllm-omni")


def deciding(config: Config) -> dict[str, Any]:
    """Returns dotted key → JSON value of the settings that determine the weights; a resume with others is refused."""
    values = dict(_deciding(config))
    if config.trainer.lr_schedule == "constant":
        # With a constant learning rate, the number of steps does not change any step.
        del values["total_steps"]
    return cast("dict[str, Any]", json.loads(json.dumps(values, default=str)))


def _deciding(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    prefix = f"{key}." if key else ""
    if is_dataclass(value):
        for member in fields(value):
            if rule_of(member).changes == WEIGHTS:
                yield from _deciding(getattr(value, member.name), prefix + member.name)
    elif isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _deciding(inner, f"{prefix}{name}")
    else:
        yield key, value


def numerics(config: Config, device: str) -> dict[str, Any]:
    """Returns what else must be equal for equal bits: settings, device type, versions (None: not installed)."""
    entries = {key: value for key, value, rule in settings(config) if rule.changes == ROUNDING}
    if config.rollout.engine == "vllm_omni":
        # The network is spread over the worker's devices, and sums over the shards round differently.
        entries["rollout.gpus_per_worker"] = config.rollout.gpus_per_worker
        entries |= {package: _installed(package) for package in _ENGINE_PACKAGES}
    if len(config.reward.terms) > 2:
        # Sums of three numbers round differently in another order.
        entries["the order of reward.terms"] = ", ".join(config.reward.terms)
    return {**entries, "device": device, "python": platform.python_version(), **{p: _installed(p) for p in _PACKAGES}}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns one phrase per changed entry, e.g. `trainer.threads was 1 and is 2`."""
    values = ((key, before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys()))
    return [f"{key} was {as_written(old)} and is {as_written(new)}" for key, old, new in values if old != new]


@lru_cache(maxsize=16)
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_type(device: str) -> str:
    return device.partition(":")[0]


def inputs_of(requests: RequestBuilder) -> dict[str, Any]:
    """Returns the digests and counts of the prompts, and `reward_sources` of trained and held-out terms. Plain JSON."""
    return {
        "train": digest_of(requests.train),
        "train_prompts": len(requests.train),
        "evaluation": digest_of(requests.evaluation),
        "evaluation_prompts": len(requests.evaluation),
        "rewards": reward_sources(requests.config.reward.terms),
        "held_out_rewards": reward_sources(requests.config.evaluate.reward.terms),
    }


def reward_sources(terms: Mapping[str, RewardTerm]) -> dict[str, str]:
    """Returns term → SHA-256 of the source of own code, and of its server's command and the files that it names."""
    sources = {}
    for key, term in terms.items():
        if parts := [*map(Path.read_bytes, filter(None, [source_of(term.name or key)])), *_server(term.serve)]:
            sources[key] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return sources


def _server(serve: ServeConfig | None) -> Iterator[bytes]:
    if serve is None:
        return
    for word in command_of(serve):
        yield word.encode()
        if word.endswith((".py", ".txt")) and os.path.isfile(word):
            yield Path(word).read_bytes()


def other_prompts(before: Mapping[str, Any], now: Mapping[str, Any], file: str) -> str | None:
    """Returns a sentence if the training prompts are not those of the checkpoint `before`, else None."""
    if before["train"] == now["train"]:
        return None
    counts = before["train_prompts"], now["train_prompts"]
    how = f"{counts[0]} before, {counts[1]} now" if counts[0] != counts[1] else f"still {counts[0]}"
    return f"the training prompts of data.train={file} are not those it was made with ({how})"


def other_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    phrases = []
    if before["evaluation"] != now["evaluation"]:
        phrases.append("the prompts of evaluations have changed, so that their curve breaks here")
    anew = "its curve begins anew"
    for kind, title, effect in (
        ("rewards", "reward", f"scores may differ and {anew}"),
        ("held_out_rewards", "held-out reward", anew),
    ):
        sources: Mapping[str, str] = before.get(kind, {})  # An old checkpoint lacks those of held-out terms.
        edited = sorted(term for term in sources.keys() & now[kind].keys() if sources[term] != now[kind][term])
        phrases += [
            f"the source file of the {title} {term!r}, or its server's command, has changed, so that {effect}"
            for term in edited
        ]
    return phrases
