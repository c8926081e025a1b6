"""The fingerprint of a run, stored in its checkpoints and compared when the run is resumed (checkpoints.py).

It has two parts: `deciding` covers what determines the weights, `numerics` what changes only their last bits. The
rule of each configuration field (`changes` in config/settings.py) says to which part the field belongs.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.own_code import source_of
from async_flowrl.config.schema import Config, RewardTerm, ServeConfig
from async_flowrl.config.settings import ROUNDING, WEIGHTS, rule_of, settings
from async_flowrl.data.store import digest_of
from async_flowrl.rewards.served import command_of
from async_flowrl.tickets.request import RequestBuilder

_PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy")
_ENGINE_PACKAGES = ("vllm", "vllm-omni")


def deciding(config: Config) -> dict[str, Any]:
    """Returns dotted key → value of the settings that determine the weights; a resume with others is refused.

    Settings that change nothing or only roundings (see `numerics`) are left out. Values are plain JSON.
    """
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
    """Returns what must be equal, besides `deciding`, for equal bits: settings, device type, package versions.

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
    """Returns term → SHA-256 (hex) of the source file of one's own code and of its server's files.

    The server's part is its command, and the Python and requirements files (.txt) that the command names. Terms of this
    package without a server are left out.
    """
    sources = {}
    for key, term in terms.items():
        if parts := [*map(Path.read_bytes, filter(None, [source_of(term.name or key)])), *_server(term.serve)]:
            sources[key] = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return sources


def _server(serve: ServeConfig | None) -> Iterator[bytes]:
    """Yields the server's command and files, which decide its scores as far as this process can see."""
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
    """Returns a phrase for each difference that a resume only warns of."""
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
