"""The fingerprint of a run, stored in its checkpoints and compared when the run is resumed (checkpoints.py).

It has two parts: `config_hash` covers what determines the weights, `numerics` what changes only their last bits. The
rule of each configuration field (`changes` in config/settings.py) says to which part the field belongs.
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
    """Returns the SHA-256 (hex) of the fields that determine the weights; a resume with another one is refused.

    Fields that change nothing or only roundings (see `numerics`) are left out.
    """
    values = _deciding(config, asdict(config))
    if config.trainer.lr_schedule == "constant":
        # With a constant learning rate, the number of steps does not change any step.
        del values["total_steps"]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _deciding(section: Any, written: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that change the weights. `written` is the section as `asdict` writes it."""
    return {
        member.name: _deciding_part(getattr(section, member.name), written[member.name])
        for member in fields(section)
        if rule_of(member).changes == WEIGHTS
    }


def _deciding_part(value: Any, written: Any) -> Any:
    """Applies `_deciding` to a section or a dictionary of sections; returns other values as `written`."""
    if is_dataclass(value):
        return _deciding(value, written)
    if isinstance(value, dict):
        return {key: _deciding_part(inner, written[key]) for key, inner in value.items()}
    return written


def numerics(config: Config, device: str) -> dict[str, Any]:
    """Returns what must be equal, besides `config_hash`, for equal bits: settings, device type, package versions.

    Values are plain JSON; None is a package that is not installed. A resume warns of differences.
    """
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
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)]  # fmt: skip


@lru_cache(maxsize=16)
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_type(device: str) -> str:
    """Returns the device without its number, e.g. `cuda` for `cuda:0`, because the number does not change results."""
    return device.partition(":")[0]
