"""Fingerprint of a run, for its resume: what determines its weights, and what decides their last bits.

Which field is in which part stands at the field (`changes` of its rule).
"""

import hashlib
import json
import platform
from dataclasses import asdict, fields, is_dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.config.settings import ROUNDING, WEIGHTS, rule_of, settings

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy")
_ENGINE_PACKAGES = ("vllm", "vllm-omni")


def config_hash(config: Config) -> str:
    """SHA-256 of what determines the weights; a run may only be resumed with the same one.

    Not in it: fields that change nothing, and those that only change roundings (see `numerics`).
    """
    values = _deciding(config)
    if config.trainer.lr_schedule == "constant":
        # Then a longer run begins like a shorter one.
        del values["total_steps"]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _deciding(section: Any) -> dict[str, Any]:
    """The fields that change the weights, as `asdict` writes them."""
    values = asdict(section)
    for member in fields(section):
        if rule_of(member).changes != WEIGHTS:
            del values[member.name]
        else:
            values[member.name] = _deciding_part(getattr(section, member.name), values[member.name])
    return values


def _deciding_part(value: Any, written: Any) -> Any:
    """The same of a field's value: a section, a dictionary of sections, or anything else as it is written."""
    if is_dataclass(value):
        return _deciding(value)
    if isinstance(value, dict):
        return {key: _deciding_part(inner, written[key]) for key, inner in value.items()}
    return written


def numerics(config: Config, device: str) -> dict[str, Any]:
    """What bit-for-bit equality needs besides `config_hash`; a resume warns where it differs. Plain JSON."""
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
    """One phrase per entry that changed, e.g. `trainer.threads was 1 and is 2`."""
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)]  # fmt: skip


@lru_cache(maxsize=16)
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
