"""The registry of rewards: finds them by built-in name or `pkg.module:attr`, checks them and builds them.

Reward workers call `build_reward`; start-up checks and plans call the functions that build nothing.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from async_flowrl.config.error_text import check_options, in_one_line, unknown_name
from async_flowrl.config.own_code import OWN_CODE, import_named
from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.rewards.base import Reward
from async_flowrl.rewards.call import Term
from async_flowrl.rewards.composite import CompositeReward
from async_flowrl.rewards.served import HTTP_NAME, check_serve
from async_flowrl.types import Prompt

REWARDS = {
    "jpeg_compressibility": "async_flowrl.rewards.image_statistics:jpeg_compressibility",
    "jpeg_incompressibility": "async_flowrl.rewards.image_statistics:jpeg_incompressibility",
    "ocr": "async_flowrl.rewards.ocr:OCR",
    "color": "async_flowrl.rewards.image_statistics:Color",
    "sharpness": "async_flowrl.rewards.image_statistics:sharpness",
    "colorfulness": "async_flowrl.rewards.image_statistics:colorfulness",
    "contrast": "async_flowrl.rewards.image_statistics:contrast",
    "diversity": "async_flowrl.rewards.image_statistics:diversity",
    "flicker": "async_flowrl.rewards.image_statistics:flicker",
    "motion": "async_flowrl.rewards.image_statistics:motion",
    "edit_consistency": "async_flowrl.rewards.image_statistics:EditConsistency",
    "clip_score": "async_flowrl.rewards.clip:ClipScore",
    "clip_direction": "async_flowrl.rewards.clip:ClipDirection",
    "pickscore": "async_flowrl.rewards.clip:PickScore",
    "hpsv2": "async_flowrl.rewards.hps:HPSv2",
    "hpsv2.1": "async_flowrl.rewards.hps:HPSv21",
    "aesthetic": "async_flowrl.rewards.aesthetic:Aesthetic",
    "http": "async_flowrl.rewards.http:HTTP",
    "vlm_judge": "async_flowrl.rewards.vlm_judge:VLMJudge",
}

DETERMINISTIC, POINTWISE, VIDEO, SOURCES = "deterministic", "pointwise", "video", "sources"
DIFFERENTIABLE = "differentiable"
# Optional attributes of rewards that must be True or False → their value if absent (see rewards/base.py).
FLAGS = {DETERMINISTIC: True, POINTWISE: False, VIDEO: False, SOURCES: False, DIFFERENTIABLE: False}
# Keys of the two sections of terms.
TRAINED, HELD_OUT = "reward.terms", "evaluate.reward.terms"
# Names that metrics.jsonl uses itself; also those that begin with `diversity_`.
RESERVED = ("reward", "diversity", "held_out")


def build_reward(config: RewardConfig, held_out: Mapping[str, RewardTerm] = MappingProxyType({})) -> CompositeReward:
    """Builds the weighted sum of all terms of `config`, and the `held_out` terms beside it. Raises ValueError."""
    if config.terms or not held_out:
        check_rewards(config)
    terms = [_build(key, term) for key, term in config.terms.items()]
    beside = [replace(_build(key, term, HELD_OUT), held_out=True) for key, term in held_out.items()]
    return CompositeReward((*terms, *beside), config)


def check_rewards(config: RewardConfig, section: str = TRAINED) -> bool:
    """Checks names, options, signatures and servers of all terms; returns True if one needs a target in every prompt.

    Nothing is built. Raises ValueError, one sentence, for the first fault, also if there is no term.
    """
    if not config.terms:
        names = ", ".join(sorted(REWARDS))
        raise ValueError(f"reward.terms must name at least one reward, for example reward=ocr; built in are {names}")
    resolved = [resolve_term(key, term, section) for key, term in config.terms.items()]
    for (key, term), attribute in zip(config.terms.items(), resolved, strict=True):
        check_serve(f"{section}.{key}", term, attribute)
    return any(bool(getattr(attribute, "needs_target", False)) for attribute in resolved)


def is_deterministic(config: RewardConfig) -> bool:
    return all(
        _flag(f"reward.terms.{key}", resolve_term(key, term), DETERMINISTIC, term.options)
        for key, term in config.terms.items()
    )


def check_differentiable(config: RewardConfig) -> None:
    """Raises ValueError for the first term without a gradient. Nothing is built."""
    for key, term in config.terms.items():
        where, attribute = f"{TRAINED}.{key}", resolve_term(key, term)
        flags = [_flag(where, attribute, flag, term.options) for flag in (DIFFERENTIABLE, SOURCES)]
        if flags != [True, False] or not hasattr(attribute, "of_tensor"):
            able = ", ".join(name for name, place in REWARDS.items() if _differentiable(name, place))
            raise ValueError(
                f"{where}: algorithm=direct_align needs the gradient of the reward from the image alone, and "
                f"{getattr(attribute, '__name__', key)} has none (differentiable = True and of_tensor); built in with "
                f"one: {able}"
            )


def _differentiable(name: str, place: str) -> bool:
    return _flag(name, import_named(name, place), DIFFERENTIABLE)


def differentiable_terms(config: RewardConfig) -> list[tuple[float, Callable[..., Any]]]:
    """Returns weight and `of_tensor` of every term, with its network loaded; raises as `check_differentiable`."""
    check_differentiable(config)
    terms = []
    for key, term in config.terms.items():
        attribute = cast("Any", resolve_term(key, term))
        if inspect.isclass(attribute):
            reward = cast("Any", _build(key, term).reward)
            getattr(reward, "load", lambda: None)()
            terms.append((term.weight, reward.of_tensor))
        else:
            terms.append((term.weight, functools.partial(attribute.of_tensor, **term.options)))
    return terms


def keeps_scores(config: RewardConfig) -> bool:
    """Returns True if the run must write scores to scores.jsonl, so that a resumed run trains on the same ones."""
    # A second call may give other scores if a term is not deterministic. It may also fail where the first did not,
    # which changes the training if a group without scores is skipped (`on_error`) or a term is optional (`required:
    # false`).
    required = all(term.required for term in config.terms.values())
    return not is_deterministic(config) or not required or config.on_error == "skip"


def _flag(where: str, attribute: object, flag: str, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    value = getattr(attribute, flag, FLAGS[flag])
    declared = fields(attribute) if is_dataclass(attribute) else ()
    if flag in options and any(field.name == flag and field.type in (bool, "bool") for field in declared):
        value = options[flag]
        if not isinstance(value, bool):
            raise ValueError(f"{where}: the option {flag} must be true or false, got {value!r:.40}")
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {flag} must be True or False at the class itself, got {type(value).__name__}")
    return value


def memory_gib(key: str, term: RewardTerm, **rows: int) -> float | None:
    """Returns the GiB of device memory that the reward states for its options; None if it states nothing.

    `differentiated` is the number of images of a trainer's pass through which a gradient goes.

    Raises ValueError if the reward cannot be found, or states something other than a finite number of at least 0.
    """
    gib = getattr(resolve_term(key, term), "memory_gib", None)
    if callable(gib):
        takes = inspect.signature(gib).parameters
        gib = gib(**term.options, **{name: value for name, value in rows.items() if name in takes})
    if gib is not None and (isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib < math.inf):
        raise ValueError(f"reward.terms.{key}: memory_gib must be a finite number of at least 0, got {gib!r}")
    return gib


def prompt_check(
    config: RewardConfig, sizes: Sequence[Resolution] = (), section: str = TRAINED
) -> Callable[[Prompt], None] | None:
    """Returns a function that raises ValueError for prompts that a term cannot score; None if all score any prompt.

    `sizes` are those in which images of a prompt without a size of its own are made; it is checked with each.
    Only terms that have a `check` are built.
    """
    resolved = {key: resolve_term(key, term, section) for key, term in config.terms.items()}
    checking = {
        key: term
        for key, term in config.terms.items()
        if hasattr(resolved[key], "check") or _flag(f"{section}.{key}", resolved[key], SOURCES, term.options)
    }
    if not checking:
        return None
    reward = CompositeReward(tuple(_build(key, term, section) for key, term in checking.items()), config)

    def check(prompt: Prompt) -> None:
        own = prompt.resolution is not None or not sizes
        reward.check([prompt] if own else [replace(prompt, resolution=size) for size in sizes])

    return check


def check_groups(config: Config, frames: int, sources: int = 0) -> None:
    """Raises ValueError for a term that cannot take a group of so many frames (images: 1), and sources, at most."""
    for section, terms, images in (
        (TRAINED, config.reward.terms, max(config.group_size, config.evaluate.images_per_prompt)),
        (HELD_OUT, config.evaluate.reward.terms, config.evaluate.images_per_prompt),
    ):
        for key, term in terms.items():
            if hasattr(resolve_term(key, term, section), "check_group"):
                built = _build(key, term, section)
                own = frames if built.video else min(frames, config.reward.frames or frames)
                try:
                    cast("Any", built.reward).check_group(images, own, *([sources] if built.sources else []))
                except ValueError as error:
                    raise ValueError(f"{section}.{key}: {error}") from error


def _build(key: str, term: RewardTerm, section: str = TRAINED) -> Term:
    """Builds a term: a class gets its options now, a function with every call; other objects are used as they are."""
    where, attribute = f"{section}.{key}", resolve_term(key, term, section)
    if inspect.isclass(attribute):
        try:
            built = attribute(**term.options)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        except Exception as error:  # whatever a class of one's own does
            raise ValueError(f"{where} cannot be built: {in_one_line(error)}") from error
        if hasattr(built, "for_term"):
            built.for_term(key)
        for flag in FLAGS:
            if getattr(built, flag, FLAGS[flag]) is not _flag(where, attribute, flag, term.options):
                raise ValueError(f"{where}: {flag} must be said at the class itself, its instance says something else")
    else:
        built = functools.partial(attribute, **term.options) if term.options else attribute
    flags = {flag: _flag(where, attribute, flag, term.options) for flag in (POINTWISE, VIDEO, SOURCES)}
    return Term(key, term.weight, cast("Reward", built), required=term.required, **flags)


def _default_name(key: str, term: RewardTerm) -> str:
    """Returns a term's key, or `http` for a term with `serve`, unless the key is a built-in reward with `connect`."""
    if term.serve is None:
        return key
    return key if key in REWARDS and hasattr(import_named(key, REWARDS[key]), "connect") else HTTP_NAME


def resolve_term(key: str, term: RewardTerm, section: str = TRAINED) -> Callable[..., Any]:
    """Returns the class, function or object that a term names, after checking its options and its call signature.

    Raises ValueError if the name is unknown or cannot be imported, or if options or signature do not fit.
    """
    where, name = f"{section}.{key}", term.name or _default_name(key, term)
    if ":" not in name and name not in REWARDS:
        raise ValueError(f"{unknown_name(where, name, REWARDS)} ({OWN_CODE})")
    attribute = import_named(where, REWARDS.get(name, name))
    if not callable(attribute):
        raise ValueError(f"{where}: {name} must be a function or a class, got {type(attribute).__name__}")
    if term.options and not (inspect.isclass(attribute) or inspect.isroutine(attribute)):
        raise ValueError(f"{where}.options: an object already built takes no options; name its class instead")
    is_class = inspect.isclass(attribute)
    sources = [None] if _flag(where, attribute, SOURCES, term.options) else []
    check_options(f"{where}.options", attribute, term.options, first=0 if is_class else 2 + len(sources))
    if is_class:
        if not any("__call__" in vars(kind) for kind in attribute.__mro__):
            raise ValueError(f"{where}: {name} must have a method __call__(self, images, prompt)")
        try:
            inspect.signature(attribute).bind(**term.options)
        except TypeError as error:
            names = ", ".join(term.options) or "none"
            raise ValueError(f"{where}: {name} cannot be built with the options given ({names}): {error}") from error
    images = "image" if _flag(where, attribute, POINTWISE) else "images"
    called_with = f"({images}, prompt{', sources' if sources else ''})"
    try:
        if is_class:
            inspect.signature(attribute.__call__).bind(None, None, None, *sources)
        else:
            inspect.signature(attribute).bind(None, None, *sources, **term.options)
    except TypeError as error:
        raise ValueError(f"{where}: {name} cannot be called with {called_with}: {error}") from error
    called = attribute.__call__ if is_class else attribute
    first = [*inspect.signature(called, follow_wrapped=False).parameters][is_class : is_class + 1]
    if first in (["prompt"], ["prompts"]):
        raise ValueError(f"{where}: {name} takes {first[0]} first, and is called with {called_with}")
    return cast("Callable[..., Any]", attribute)


def check_held_out(config: Config) -> bool:
    """Checks all held-out terms like `check_rewards`, and their keys. Raises ValueError, one sentence."""
    terms = config.evaluate.reward.terms
    for name in terms:
        where = f"{HELD_OUT}.{name}"
        if name in RESERVED or name.startswith("diversity_"):
            raise ValueError(f"{where}: metrics.jsonl uses the name {name!r} for something else; choose another key")
        if name in config.reward.terms:
            another = f"choose another key, with name: {terms[name].name or name}"
            raise ValueError(
                f"{where}: reward.terms has {name!r} too, and no term is both trained and held out; {another}"
            )
    return bool(terms) and check_rewards(RewardConfig(terms=terms), HELD_OUT)
