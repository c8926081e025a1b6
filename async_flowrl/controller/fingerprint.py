"""What a resumed run is compared with: what determines its weights, and what decides their last bits."""

import hashlib
import json
import platform
from dataclasses import asdict
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_flowrl.config.schema import Config

_FREE = (
    "name",
    "output_dir",
    "mode",
    "epochs",
    "hand_over",
    "resume",
    "placement",
    "time_limit",
    "dry_run",
    "model.family",
    "rollout.num_workers",
    "rollout.gpus_per_worker",
    "reward.num_workers",
    "reward.threads",
    "reward.retries",
    "reward.backoff",
    "data.evaluation",
    "trainer.gpus_per_worker",
    "checkpoint_engine",
    "save",
    "evaluate",
    "monitor",
    "hardware",
    "deadlines",
    "runtime",
    "debug.delays",
)
"""Free to change from one part of a run to the next: not a bit of the weights depends on it (but see `numerics`)."""
_NUMERICAL = (
    "ticket_size",
    "rollout.batch_size",
    "rollout.threads",
    "rollout.compile",
    "model.attention_backend",
    "trainer.num_workers",
    "trainer.threads",
    "trainer.micro_batch_size",
    "trainer.timesteps_per_forward",
    "trainer.gradient_checkpointing",
    "trainer.compile",
    "trainer.prefetch",
    "trainer.cpu_offload",
)
"""The same mathematics in other shapes: only the order of roundings depends on it."""
_PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy")
_ENGINE_PACKAGES = ("vllm", "vllm-omni")


def config_hash(config: Config) -> str:
    """SHA-256 of what determines the weights; a run may only be resumed with the same one.

    Not in it: worker counts, transport, monitor, delays, output, and what only changes roundings (see `numerics`).
    """
    values = asdict(config)
    for key in (*_FREE, *_NUMERICAL):
        *parents, last = key.split(".")
        section = values
        for parent in parents:
            section = section[parent]
        del section[last]
    if config.trainer.lr_schedule == "constant":
        # Then a longer run begins like a shorter one.
        del values["total_steps"]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def numerics(config: Config, device: str | None = None) -> dict[str, Any]:
    """What bit-for-bit equality needs besides `config_hash`; a resume warns where it differs. Plain JSON."""
    found: dict[str, Any] = {}
    for key in _NUMERICAL:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        found[key] = value
    if config.rollout.engine == "vllm_omni":
        # The network is spread over the worker's devices, and sums over the shards round differently.
        found["rollout.gpus_per_worker"] = config.rollout.gpus_per_worker
        found |= {package: _installed(package) for package in _ENGINE_PACKAGES}
    return {**found, "device": device, "python": platform.python_version(), **{p: _installed(p) for p in _PACKAGES}}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One phrase per entry that changed, e.g. `trainer.num_workers was 1 and is 2`."""
    return [f"{key} was {before.get(key)} and is {now.get(key)}" for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)]  # fmt: skip


@lru_cache(maxsize=16)
def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
