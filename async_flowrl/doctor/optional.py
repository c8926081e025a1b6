"""Optional features of the installation: each names the software that it needs, and the pools that need it.

`optional_findings` looks at this machine. On a cluster `missing` looks at every node, and node_features.py judges.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.reward_pools import held_out_by_pool, scoring_pools
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.reward import RewardTerm, ServeConfig
from async_flowrl.config.shared import SHARED
from async_flowrl.doctor.facts import importable
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, Finding
from async_flowrl.doctor.machine import nccl_version
from async_flowrl.rewards.served import served_terms, server_pool
from async_flowrl.rollout.vllm_omni import settings as vllm_omni
from checkpoint_engine.pynccl import load_nccl
from checkpoint_engine.transports import NCCL, PYNCCL

HPS_REWARDS = ("hpsv2", "hpsv2.1")
SERVE_COMMANDS = ("serve-rewards", "serve_rewards")
"""Words of a command line that starts this package's own reward server."""


@dataclass(frozen=True)
class Feature:
    """Optional feature, which needs software or a device that a machine may lack."""

    what: str
    """Its purpose."""
    lack: Callable[[], str | None]
    """Returns which software is missing on this machine, with the command that installs it; None if nothing is."""
    needed_by: Callable[[Config], Sequence[str]]
    """Returns the names of the pools whose workers need it in a configuration; empty if none does."""
    on_device: bool = False
    """True if it also needs a GPU."""


def why_not(check: Callable[[], object]) -> str | None:
    """Returns the message of the ValueError that `check` raises, None if it raises none."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


def torch_nccl() -> str | None:
    """Returns a sentence if torch was built without NCCL; None if it has it."""
    return None if dist.is_nccl_available() else f"torch {torch.__version__} was built without NCCL"


def cupy_nccl() -> str | None:
    """Returns why cupy's NCCL cannot be used; None if it can."""
    if not importable("cupy"):
        return "no cupy: pip install 'async-flowrl[nccl]' (CUDA 13) or 'async-flowrl[nccl-cuda12]'"
    return why_not(load_nccl)


def no_device() -> str | None:
    """Returns a sentence if torch sees no GPU in this process; None if it sees one."""
    return None if torch.cuda.is_available() else f"no CUDA device: torch {torch.__version__} sees none"


def modules(names: Sequence[str], extra: str) -> str | None:
    """Returns which of the modules are missing and the command that installs them; None if none is missing."""
    absent = [name for name in names if not importable(name)]
    return f"no {' and no '.join(absent)}: pip install 'async-flowrl[{extra}]'" if absent else None


def weights_by(config: Config, transport: str) -> list[str]:
    """Returns the pools that send or receive weights if the configuration names this transport, else nothing."""
    if config.checkpoint_engine.transport != transport:
        return []
    return [SHARED] if config.placement == SHARED else [TRAINER, ROLLOUT]


def scored_by(config: Config, wanted: Callable[[str, RewardTerm], bool]) -> list[str]:
    """Returns the reward pools that score by a term, trained or held out, whose key and settings are `wanted`."""
    held_out = held_out_by_pool(config)
    terms = {
        pool.name: {**pool.config(config.reward).terms, **held_out.get(pool.name, {})} for pool in scoring_pools(config)
    }
    return [pool for pool, own in terms.items() if any(wanted(*term) for term in own.items())]


def ours(serve: ServeConfig) -> bool:
    """Returns True if the command starts this package's reward server in the workers' own environment."""
    words = serve.command if isinstance(serve.command, str) else " ".join(map(str, serve.command or ()))
    return not words.startswith("uv ") and any(word in words for word in SERVE_COMMANDS)


FEATURES: Mapping[str, Feature] = {
    "NCCL": Feature("weights from GPU to GPU", torch_nccl, lambda config: weights_by(config, NCCL), on_device=True),
    "cupy": Feature("transport pynccl", cupy_nccl, lambda config: weights_by(config, PYNCCL), on_device=True),
    "vllm-omni": Feature(
        "rollout.engine=vllm_omni",
        lambda: why_not(vllm_omni.check_installed),
        lambda config: [ROLLOUT] if config.rollout.engine == "vllm_omni" else [],
    ),
    "serve-rewards": Feature(
        "extra serve",
        lambda: modules(("fastapi", "uvicorn", "python_multipart"), "serve"),
        lambda config: [server_pool(term) for term, serve in served_terms(config) if ours(serve)],
    ),
    "reward hps": Feature(
        "extra hps",
        lambda: modules(("ftfy",), "hps"),
        lambda config: scored_by(config, lambda key, term: (term.name or key) in HPS_REWARDS),
    ),
}
"""Name of an optional feature → the feature."""


def missing(names: Sequence[str]) -> dict[str, str]:
    """Returns name of a feature → the software that it lacks on this machine; features that lack none are left out.

    The doctor calls it on every node of a cluster. GPUs do not count, because the calling process may have been given
    none.
    """
    return {name: lack for name in names if (lack := FEATURES[name].lack()) is not None}


def needed(config: Config) -> dict[str, Sequence[str]]:
    """Returns name of a feature → the pools that need it, for the features that the configuration needs."""
    return {name: pools for name, feature in FEATURES.items() if (pools := feature.needed_by(config))}


def optional_findings(config: Config | None = None) -> list[Finding]:
    """Returns one finding per feature: ok or skipped, or failed if the configuration needs one that is missing.

    With a cluster, a feature that this machine lacks is skipped, because the nodes of the workers are asked for it.
    """
    return [finding_of(name, feature, config) for name, feature in FEATURES.items()]


def finding_of(name: str, feature: Feature, config: Config | None) -> Finding:
    """Returns the finding on one feature; `config` is the configuration that may need it, or None."""
    title = f"optional {name}"
    lack = feature.lack() or (no_device() if feature.on_device else None)
    if lack is None:
        number = f" {nccl_version()}" if name == "NCCL" else ""
        return Finding(title, OK, f"here{number}, for {feature.what}")
    if config is None or not feature.needed_by(config):
        return Finding(title, SKIPPED, lack, f"needed for {feature.what} alone")
    if config.runtime.address is not None:
        return Finding(title, SKIPPED, lack, f"the workers need it ({feature.what}), and each node is asked for it")
    return Finding(title, FAILED, lack, f"this configuration asks for it ({feature.what})")
