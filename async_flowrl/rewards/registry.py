"""Registry of rewards: the built-in ones by name, and your own as `pkg.module:attr`."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from async_flowrl.config.messages import unknown_name
from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import Reward
from async_flowrl.rewards.composite import CompositeReward, Term
from async_flowrl.types import Prompt

REWARDS = {
    "jpeg_compressibility": "async_flowrl.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "async_flowrl.rewards.jpeg:jpeg_incompressibility",
    "ocr": "async_flowrl.rewards.ocr:OCR",
    "color": "async_flowrl.rewards.color:Color",
    "pickscore": "async_flowrl.rewards.pickscore:PickScore",
}


def build_reward(config: RewardConfig) -> CompositeReward:
    """The weighted sum that the configuration asks for. Raises ValueError, one sentence, for what cannot be built."""
    check_rewards(config)
    return CompositeReward(tuple(_build(key, term) for key, term in config.terms.items()))


def check_rewards(config: RewardConfig) -> bool:
    """Checks names, options and signatures without building anything; returns whether a term needs a target.

    Raises ValueError, one sentence.
    """
    if not config.terms:
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"reward.terms must name at least one reward, for example reward=ocr; built in are {known}")
    resolved = [_resolve(key, term) for key, term in config.terms.items()]
    return any(bool(getattr(attribute, "needs_target", False)) for attribute in resolved)


def is_deterministic(config: RewardConfig) -> bool:
    """Whether no term says `deterministic = False`. Builds nothing: the class, function or object itself says it."""
    return all(_deterministic(f"reward.terms.{key}", _resolve(key, term)) for key, term in config.terms.items())


def _deterministic(where: str, attribute: object) -> bool:
    said = getattr(attribute, "deterministic", True)
    if not isinstance(said, bool):
        raise ValueError(f"{where}: deterministic must be True or False at the class itself, got {type(said).__name__}")
    return said


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a term cannot score. Builds only the terms that have a `check`."""
    checking = {key: term for key, term in config.terms.items() if hasattr(_resolve(key, term), "check")}
    CompositeReward(tuple(_build(key, term) for key, term in checking.items())).check(prompts)


def _build(key: str, term: RewardTerm) -> Term:
    """Classes are built with their options, functions get them with every call, objects are taken as they are."""
    attribute = _resolve(key, term)
    if not inspect.isclass(attribute):
        return Term(key, term.weight, functools.partial(attribute, **term.options) if term.options else attribute)
    where = f"reward.terms.{key}"
    try:
        built = attribute(**term.options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if getattr(built, "deterministic", True) is not _deterministic(where, attribute):
        raise ValueError(f"{where}: deterministic must be said at the class itself, its instance says something else")
    return Term(key, term.weight, cast("Reward", built))


def _resolve(key: str, term: RewardTerm) -> Callable[..., Any]:
    """The class, function or object that a term names, with its options and its call signature checked."""
    where, name = f"reward.terms.{key}", term.name or key
    if ":" not in name and name not in REWARDS:
        raise ValueError(f"{unknown_name(where, name, REWARDS)} (one of your own is written pkg.module:attr)")
    attribute = _import(where, REWARDS.get(name, name))
    if not callable(attribute):
        raise ValueError(f"{where}: {name} must be a function or a class, got {type(attribute).__name__}")
    _check_options(where, attribute, term.options)
    arguments = [None] * (3 if inspect.isclass(attribute) else 2)
    called = attribute.__call__ if inspect.isclass(attribute) else attribute
    try:
        inspect.signature(called).bind(*arguments, **({} if inspect.isclass(attribute) else term.options))
    except TypeError as error:
        raise ValueError(f"{where}: {name} cannot be called with (images, prompt): {error}") from error
    return attribute


def _check_options(where: str, attribute: Callable[..., Any], options: Mapping[str, Any]) -> None:
    if options and not (inspect.isclass(attribute) or inspect.isroutine(attribute)):
        raise ValueError(f"{where}.options: an object already built takes no options; name its class instead")
    parameters = list(inspect.signature(attribute).parameters.values())
    if not inspect.isclass(attribute):
        parameters = parameters[2:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in known:
            allowed = unknown_name("an option", option, known) if known else f"it takes none, got {option!r}"
            raise ValueError(f"{where}.options: {allowed}")


def _import(where: str, path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"{where}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(f"{where}: {unknown_name(f'the name after the colon of {path}', attribute, public)}")
    named: object = getattr(module, attribute)
    return named
