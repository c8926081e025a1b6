"""Names to rewards: the built-in ones, and your own as `pkg.module:attr`."""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from async_flowrl.config import RewardConfig, RewardTerm
from async_flowrl.naming import unknown_name
from async_flowrl.rewards.base import Reward
from async_flowrl.rewards.composite import CompositeReward, Term

REWARDS = {
    "jpeg_compressibility": "async_flowrl.rewards.jpeg:jpeg_compressibility",
    "jpeg_incompressibility": "async_flowrl.rewards.jpeg:jpeg_incompressibility",
    "ocr": "async_flowrl.rewards.ocr:OCR",
    "color": "async_flowrl.rewards.color:Color",
}


def build_reward(config: RewardConfig) -> CompositeReward:
    """The weighted sum that the configuration asks for. Raises ValueError, one sentence, for what cannot be built."""
    if not config.terms:
        raise ValueError(f"reward.terms must name at least one reward; built in are {', '.join(sorted(REWARDS))}")
    return CompositeReward(tuple(_term(key, term) for key, term in config.terms.items()))


def _term(key: str, term: RewardTerm) -> Term:
    if not math.isfinite(term.weight):
        raise ValueError(f"reward.terms.{key}.weight must be a finite number, got {term.weight}")
    name = term.name or key
    return Term(key, term.weight, _reward(f"reward.terms.{key}", name, term.options))


def _reward(key: str, name: str, options: Mapping[str, Any]) -> Reward:
    if ":" not in name and name not in REWARDS:
        raise ValueError(f"{unknown_name(key, name, REWARDS)}; your own is named pkg.module:attr")
    attribute = _import(key, REWARDS.get(name, name))
    if not callable(attribute):
        raise ValueError(f"{key}: {name} must be a function or a class, got {type(attribute).__name__}")
    try:
        reward = _with_options(attribute, dict(options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {name} cannot be built with options {dict(options)}: {error}") from error
    _check_signature(key, name, reward)
    return cast("Reward", reward)


def _with_options(attribute: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Classes are built with their options, functions get them with every call, objects are taken as they are."""
    if inspect.isclass(attribute):
        return cast("Callable[..., Any]", attribute(**options))
    if not options:
        return attribute
    if not inspect.isroutine(attribute):
        raise ValueError("it is an object already built; name its class instead")
    known = inspect.signature(attribute).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not open_ended:
            raise ValueError(unknown_name("an option", option, list(known)[2:]))
    return functools.partial(attribute, **options)


def _check_signature(key: str, name: str, reward: object) -> None:
    if not callable(reward):
        raise ValueError(
            f"{key}: {name} builds a {type(reward).__name__}, which cannot be called with (images, prompt)"
        )
    try:
        inspect.signature(reward).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{key}: {name} cannot be called with (images, prompt): {error}") from error


def _import(key: str, path: str) -> object:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ValueError(unknown_name(f"{key}: the part after the colon of {path}", attribute, public))
    return cast("object", getattr(module, attribute))
