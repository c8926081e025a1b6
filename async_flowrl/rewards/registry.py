"""The registry of rewards: finds them by built-in name or `pkg.module:attr`, checks them and builds them.

Reward workers call `build_reward`; start-up checks and plans call the functions that build nothing.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from async_flowrl.config.messages import check_options, in_one_line, unknown_name
from async_flowrl.config.own_code import OWN_CODE, import_named
from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.base import Reward
from async_flowrl.rewards.call import Attempts
from async_flowrl.rewards.composite import CompositeReward, Term
from async_flowrl.rewards.served import HTTP_NAME, check_serve
from async_flowrl.types import Prompt

REWARDS = {
    "jpeg_compressibility": "async_flowrl.rewards.image_statistics:jpeg_compressibility",
    "jpeg_incompressibility": "async_flowrl.rewards.image_statistics:jpeg_incompressibility",
    "ocr": "async_flowrl.rewards.ocr:OCR",
    "color": "async_flowrl.rewards.image_statistics:Color",
    "sharpness": "async_flowrl.rewards.image_statistics:sharpness",
    "colorfulness": "async_flowrl.rewards.image_statistics:colorfulness",
    "clip_score": "async_flowrl.rewards.clip:ClipScore",
    "pickscore": "async_flowrl.rewards.clip:PickScore",
    "hpsv2": "async_flowrl.rewards.hps:HPSv2",
    "hpsv2.1": "async_flowrl.rewards.hps:HPSv21",
    "aesthetic": "async_flowrl.rewards.aesthetic:Aesthetic",
    "http": "async_flowrl.rewards.http:HTTP",
    "vlm_judge": "async_flowrl.rewards.vlm_judge:VLMJudge",
}

DETERMINISTIC, POINTWISE = "deterministic", "pointwise"
FLAGS = {DETERMINISTIC: True, POINTWISE: False}
"""Optional attributes of rewards that must be True or False → their value if absent (see rewards/base.py)."""


def build_reward(config: RewardConfig) -> CompositeReward:
    """Builds the weighted sum of all terms of `config`.

    Raises ValueError, one sentence, if a term has a wrong name, option, signature or server, or cannot be built.
    """
    check_rewards(config)
    terms = tuple(_build(key, term) for key, term in config.terms.items())
    return CompositeReward(terms, attempts_of(config))


def attempts_of(config: RewardConfig) -> Attempts:
    """Returns the limits of pointwise terms that the configuration sets."""
    return Attempts(config.retries, config.backoff, config.concurrency)


def check_rewards(config: RewardConfig) -> bool:
    """Checks names, options, signatures and servers of all terms without building anything.

    Returns True if a term needs a target in every prompt. Raises ValueError, one sentence, for the first fault, also if
    there is no term.
    """
    if not config.terms:
        known = ", ".join(sorted(REWARDS))
        raise ValueError(f"reward.terms must name at least one reward, for example reward=ocr; built in are {known}")
    resolved = [resolve_term(key, term) for key, term in config.terms.items()]
    for (key, term), attribute in zip(config.terms.items(), resolved, strict=True):
        check_serve(f"reward.terms.{key}", term, attribute)
    return any(bool(getattr(attribute, "needs_target", False)) for attribute in resolved)


def is_deterministic(config: RewardConfig) -> bool:
    """Returns True if no term says `deterministic = False`; nothing is built."""
    return all(
        _said(f"reward.terms.{key}", resolve_term(key, term), DETERMINISTIC, term.options)
        for key, term in config.terms.items()
    )


def keeps_scores(config: RewardConfig) -> bool:
    """Returns True if the run must write scores to scores.jsonl, so that a resumed run trains on the same ones.

    A second call may give other scores if a term is not deterministic. It may also fail where the first did not, which
    changes the training if a group without scores is skipped (`on_error`) or a term is optional (`required: false`).
    """
    required = all(term.required for term in config.terms.values())
    return not is_deterministic(config) or not required or config.on_error == "skip"


def _said(where: str, attribute: object, flag: str, options: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Returns the value of a flag: the option of that name if there is one, else the attribute, else its default."""
    said = options.get(flag, getattr(attribute, flag, FLAGS[flag]))
    if not isinstance(said, bool):
        raise ValueError(f"{where}: {flag} must be True or False at the class itself, got {type(said).__name__}")
    return said


def memory_gib(key: str, term: RewardTerm) -> float | None:
    """Returns the GiB of device memory that the reward states for its options; None if it states nothing.

    Raises ValueError if the reward cannot be found, or states something other than a finite number of at least 0.
    """
    said = getattr(resolve_term(key, term), "memory_gib", None)
    said = said(**term.options) if callable(said) else said
    if said is not None and (isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said < math.inf):
        raise ValueError(f"reward.terms.{key}: memory_gib must be a finite number of at least 0, got {said!r}")
    return said


def check_prompts(config: RewardConfig, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a term cannot score. Only terms that have a `check` are built."""
    if (check := prompt_check(config)) is not None:
        for prompt in prompts:
            check(prompt)


def prompt_check(config: RewardConfig) -> Callable[[Prompt], None] | None:
    """Returns a function that raises ValueError for prompts that a term cannot score; None without any `check`."""
    checking = {key: term for key, term in config.terms.items() if hasattr(resolve_term(key, term), "check")}
    if not checking:
        return None
    reward = CompositeReward(tuple(_build(key, term) for key, term in checking.items()))
    return lambda prompt: reward.check((prompt,))


def _build(key: str, term: RewardTerm) -> Term:
    """Builds a term: a class gets its options now, a function with every call; other objects are used as they are."""
    where, attribute = f"reward.terms.{key}", resolve_term(key, term)
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
            if getattr(built, flag, FLAGS[flag]) is not _said(where, attribute, flag, term.options):
                raise ValueError(f"{where}: {flag} must be said at the class itself, its instance says something else")
    else:
        built = functools.partial(attribute, **term.options) if term.options else attribute
    pointwise = _said(where, attribute, POINTWISE)
    return Term(key, term.weight, cast("Reward", built), required=term.required, pointwise=pointwise)


def _default_name(key: str, term: RewardTerm) -> str:
    """Returns the name of a term that sets none: its key, or `http` for a term with a server (`serve`).

    A key that is itself a built-in reward with `connect` (for example vlm_judge) stays the name, also with a server.
    """
    if term.serve is None:
        return key
    return key if key in REWARDS and hasattr(import_named(key, REWARDS[key]), "connect") else HTTP_NAME


def resolve_term(key: str, term: RewardTerm) -> Callable[..., Any]:
    """Returns the class, function or object that a term names, after checking its options and its call signature.

    Raises ValueError if the name is unknown or cannot be imported, or if options or signature do not fit.
    """
    where, name = f"reward.terms.{key}", term.name or _default_name(key, term)
    if ":" not in name and name not in REWARDS:
        raise ValueError(f"{unknown_name(where, name, REWARDS)} ({OWN_CODE})")
    attribute: Callable[..., Any] = import_named(where, REWARDS.get(name, name))
    if not callable(attribute):
        raise ValueError(f"{where}: {name} must be a function or a class, got {type(attribute).__name__}")
    if term.options and not (inspect.isclass(attribute) or inspect.isroutine(attribute)):
        raise ValueError(f"{where}.options: an object already built takes no options; name its class instead")
    check_options(f"{where}.options", attribute, term.options, first=0 if inspect.isclass(attribute) else 2)
    arguments = [None] * (3 if inspect.isclass(attribute) else 2)
    called = attribute.__call__ if inspect.isclass(attribute) else attribute
    if inspect.isclass(attribute):
        if not any("__call__" in vars(kind) for kind in attribute.__mro__):
            raise ValueError(f"{where}: {name} must have a method __call__(self, images, prompt)")
        try:
            inspect.signature(attribute).bind(**term.options)
        except TypeError as error:
            given = ", ".join(term.options) or "none"
            raise ValueError(f"{where}: {name} cannot be built with the options given ({given}): {error}") from error
    try:
        inspect.signature(called).bind(*arguments, **({} if inspect.isclass(attribute) else term.options))
    except TypeError as error:
        first = "image" if _said(where, attribute, POINTWISE) else "images"
        raise ValueError(f"{where}: {name} cannot be called with ({first}, prompt): {error}") from error
    return attribute
