"""Registry of rewards: the built-in ones by name, and your own as `pkg.module:attr`."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from async_flowrl.config.messages import check_options, unknown_name
from async_flowrl.config.own_code import import_named
from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import Reward
from async_flowrl.rewards.call import Attempts
from async_flowrl.rewards.composite import CompositeReward, Term
from async_flowrl.rewards.served import HTTP_NAME, check_serve
from async_flowrl.types import Prompt

REWARDS = {
    "jpeg_compressibility": "async_flowrl.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "async_flowrl.rewards.jpeg:jpeg_incompressibility",
    "ocr": "async_flowrl.rewards.ocr:OCR",
    "color": "async_flowrl.rewards.color:Color",
    "sharpness": "async_flowrl.rewards.image_statistics:sharpness",
    "colorfulness": "async_flowrl.rewards.image_statistics:colorfulness",
    "clip_score": "async_flowrl.rewards.clip_score:ClipScore",
    "pickscore": "async_flowrl.rewards.pickscore:PickScore",
    "hpsv2": "async_flowrl.rewards.hps:HPSv2",
    "hpsv2.1": "async_flowrl.rewards.hps:HPSv21",
    "aesthetic": "async_flowrl.rewards.aesthetic:Aesthetic",
    "http": "async_flowrl.rewards.http:HTTP",
    "vlm_judge": "async_flowrl.rewards.vlm_judge:VLMJudge",
}

DETERMINISTIC, POINTWISE = "deterministic", "pointwise"
FLAGS = {DETERMINISTIC: True, POINTWISE: False}
"""Optional attributes that are True or False, and what they are if absent (see rewards/base.py)."""


def build_reward(config: RewardConfig) -> CompositeReward:
    """The weighted sum that the configuration asks for. Raises ValueError, one sentence, for what cannot be built."""
    check_rewards(config)
    terms = tuple(_build(key, term) for key, term in config.terms.items())
    return CompositeReward(terms, Attempts(config.retries, config.backoff, config.concurrency))


def check_rewards(config: RewardConfig) -> bool:
    """Checks names, options and signatures without building anything; returns whether a term needs a target.

    Raises ValueError, one sentence.
    """
    if not config.terms:
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"reward.terms must name at least one reward, for example reward=ocr; built in are {known}")
    resolved = [resolve_term(key, term) for key, term in config.terms.items()]
    for (key, term), attribute in zip(config.terms.items(), resolved, strict=True):
        check_serve(f"reward.terms.{key}", term, attribute)
    return any(bool(getattr(attribute, "needs_target", False)) for attribute in resolved)


def is_deterministic(config: RewardConfig) -> bool:
    """Whether no term says `deterministic = False`. Builds nothing: the class, function or object itself says it."""
    return all(
        _said(f"reward.terms.{key}", resolve_term(key, term), DETERMINISTIC, term.options)
        for key, term in config.terms.items()
    )


def keeps_scores(config: RewardConfig) -> bool:
    """Whether scores must be written down, so that a resume has the same: another call may score differently, or fail
    where a group is skipped for it, or is trained on the others without an optional term."""
    required = all(term.required for term in config.terms.values())
    return not is_deterministic(config) or not required or config.on_error == "skip"


def _said(where: str, attribute: object, flag: str, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """What the attribute says of itself; an option of the flag's name, where it has one, says it instead."""
    said = options.get(flag, getattr(attribute, flag, FLAGS[flag]))
    if not isinstance(said, bool):
        raise ValueError(f"{where}: {flag} must be True or False at the class itself, got {type(said).__name__}")
    return said


def memory_gib(key: str, term: RewardTerm) -> float | None:
    """GiB of device memory that the reward says it takes with its options; None where it does not say.

    Raises ValueError for a reward that cannot be found, or that says something else than a number.
    """
    said = getattr(resolve_term(key, term), "memory_gib", None)
    said = said(**term.options) if callable(said) else said
    if said is not None and (isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said < math.inf):
        raise ValueError(f"reward.terms.{key}: memory_gib must be a finite number of at least 0, got {said!r}")
    return said


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a term cannot score. Builds only the terms that have a `check`."""
    if (check := prompt_check(config)) is not None:
        for prompt in prompts:
            check(prompt)


def prompt_check(config: RewardConfig) -> Callable[[Prompt], None] | None:
    """Raises ValueError for a prompt that a term cannot score; None where no term has a `check`."""
    checking = {key: term for key, term in config.terms.items() if hasattr(resolve_term(key, term), "check")}
    if not checking:
        return None
    reward = CompositeReward(tuple(_build(key, term) for key, term in checking.items()))
    return lambda prompt: reward.check((prompt,))


def _build(key: str, term: RewardTerm) -> Term:
    """Classes are built with their options, functions get them with every call, objects are taken as they are."""
    where, attribute = f"reward.terms.{key}", resolve_term(key, term)
    if inspect.isclass(attribute):
        try:
            built = attribute(**term.options)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        for flag in FLAGS:
            if getattr(built, flag, FLAGS[flag]) is not _said(where, attribute, flag, term.options):
                raise ValueError(f"{where}: {flag} must be said at the class itself, its instance says something else")
    else:
        built = functools.partial(attribute, **term.options) if term.options else attribute
    pointwise = _said(where, attribute, POINTWISE)
    return Term(key, term.weight, cast("Reward", built), required=term.required, pointwise=pointwise)


def _default_name(key: str, term: RewardTerm) -> str:
    """The key; `http` for a term with a server, unless the key names a reward that asks a server in its own way."""
    if term.serve is None:
        return key
    return key if key in REWARDS and hasattr(import_named(key, REWARDS[key]), "connect") else HTTP_NAME


def resolve_term(key: str, term: RewardTerm) -> Callable[..., Any]:
    """The class, function or object that a term names, with its options and its call signature checked."""
    where, name = f"reward.terms.{key}", term.name or _default_name(key, term)
    if ":" not in name and name not in REWARDS:
        raise ValueError(f"{unknown_name(where, name, REWARDS)} (one of your own is written pkg.module:attr)")
    attribute: Callable[..., Any] = import_named(where, REWARDS.get(name, name))
    if not callable(attribute):
        raise ValueError(f"{where}: {name} must be a function or a class, got {type(attribute).__name__}")
    if term.options and not (inspect.isclass(attribute) or inspect.isroutine(attribute)):
        raise ValueError(f"{where}.options: an object already built takes no options; name its class instead")
    check_options(f"{where}.options", attribute, term.options, first=0 if inspect.isclass(attribute) else 2)
    arguments = [None] * (3 if inspect.isclass(attribute) else 2)
    called = attribute.__call__ if inspect.isclass(attribute) else attribute
    try:
        inspect.signature(called).bind(*arguments, **({} if inspect.isclass(attribute) else term.options))
    except TypeError as error:
        first = "image" if _said(where, attribute, POINTWISE) else "images"
        raise ValueError(f"{where}: {name} cannot be called with ({first}, prompt): {error}") from error
    return attribute
