"""Software and devices as torch sees them, and optional features: and what needs them."""

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import served_terms
from async_flowrl.rollout.vllm_omni.engine_settings import check_installed
from async_flowrl.run.findings import FAILED, SKIPPED, WARNING, Finding, verdict
from async_flowrl.run.machines import GIB, PACKAGES, Machine, everywhere, importable, version
from checkpoint_engine.transports import NCCL, PYNCCL, resolve_transport

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # Distributions that provide the module cupy.
# First compute capability whose tensor cores multiply bfloat16; least free share of the memory of a device that no
# other program uses.
LEAST_CAPABILITY, MIN_FREE_SHARE = (8, 0), 0.9
SERVE_MODULES = ("fastapi", "uvicorn", "python_multipart")
HPS_REWARDS = ("hpsv2", "hpsv2.1")
# Command that starts this package's own reward server, unless uv makes an environment for it.
OWN_SERVER = re.compile(r"(?!uv ).*serve[-_]rewards")


def software() -> dict[str, str]:
    versions = {name: version(name) for name in ("async-flowrl", *PACKAGES, *CUPY)}
    versions = {"Python": platform.python_version(), **versions}
    versions |= {"torch": torch.__version__, "CUDA": str(torch.version.cuda or "none")}
    if torch.version.cuda is not None and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: number for name, number in versions.items() if number != "none"}


def device_findings() -> Iterator[Finding]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        capability, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
        sentence = f"{name}, {total / GIB:.1f} GiB, {free / GIB:.1f} free, capability {capability[0]}.{capability[1]}"
        old = capability < LEAST_CAPABILITY, FAILED, "bfloat16 needs capability 8.0 (Ampere) or newer"
        crowded = free < MIN_FREE_SHARE * total, WARNING, "something else holds memory there: see nvidia-smi, end it"
        yield verdict(f"device {index}", sentence, old, crowded)


@dataclass(frozen=True)
class Feature:
    what: str  # Its purpose.
    check: Callable[[], object]  # Raises ValueError, with what to install, if this machine lacks its software.
    needed_by: Callable[[Config], bool]  # Whether workers need it in a configuration.
    on_device: bool = False  # True if it also needs a GPU.

    def lack(self) -> str | None:
        try:
            self.check()
        except ValueError as error:
            return str(error)
        return None


def modules(extra: str, *names: str) -> None:
    """Raises ValueError with the modules that are missing and the command that installs them."""
    if absent := [name for name in names if not importable(name)]:
        raise ValueError(f"no {' and no '.join(absent)}: pip install 'async-flowrl[{extra}]'")


def scored_by_hps(config: Config) -> bool:
    terms = [*config.reward.terms.items(), *config.evaluate.reward.terms.items()]
    return any((term.name or key) in HPS_REWARDS for key, term in terms)


def own_servers(config: Config) -> bool:
    commands = [serve.command or () for _, serve in served_terms(config)]
    texts = (words if isinstance(words, str) else " ".join(map(str, words)) for words in commands)
    return any(map(OWN_SERVER.match, texts))


def transport(name: str) -> Feature:
    check = partial(resolve_transport, name, "cuda")
    return Feature(f"transport {name}", check, lambda config: config.checkpoint_engine.transport == name, True)


# Name of an optional feature → the feature.
FEATURES = {
    "NCCL": transport(NCCL),
    "cupy": transport(PYNCCL),
    "vllm-omni": Feature(
        "rollout.engine=vllm_omni", check_installed, lambda config: config.rollout.engine == "vllm_omni"
    ),
    "serve-rewards": Feature("extra serve", partial(modules, "serve", *SERVE_MODULES), own_servers),
    "reward hps": Feature("extra hps", partial(modules, "hps", "ftfy"), scored_by_hps),
}


def missing(names: Sequence[str]) -> dict[str, str]:
    # The doctor calls it on every node. GPUs do not count, because the calling process may have been given none.
    return {name: lack for name in names if (lack := FEATURES[name].lack()) is not None}


def needed(config: Config) -> list[str]:
    return [name for name, feature in FEATURES.items() if feature.needed_by(config)]


def optional_finding(name: str, config: Config | None) -> Finding:
    """Returns the finding on one feature on this machine; failed if `config` needs it here and it is missing."""
    # With a cluster it is skipped instead, because the nodes of the workers are asked for it.
    feature = FEATURES[name]
    lack = feature.lack() or ("no GPU" if feature.on_device and not torch.cuda.is_available() else None)
    status, why = FAILED, f"this configuration asks for it ({feature.what})"
    if config is None or not feature.needed_by(config):
        status, why = SKIPPED, f"needed for {feature.what} alone"
    elif config.runtime.address is not None:
        status, why = SKIPPED, f"needed for {feature.what}, and each node is asked for it"
    return verdict(f"optional {name}", lack or f"here, for {feature.what}", (lack is not None, status, why))


def feature_findings(config: Config, machines: Sequence[Machine]) -> Iterator[Finding]:
    # Lacking on some nodes is a warning, because they may have no room for a worker that needs it.
    for name in needed(config):
        what = FEATURES[name].what
        lacking = [f"{one.name}: {one.lacks[name]}" for one in machines if name in one.lacks]
        advice = f"needed for {what}: install it there, or start Ray there without room for workers that need it"
        status = FAILED if len(lacking) == len(machines) else WARNING
        sentence = "; ".join(lacking) or f"on {everywhere(machines)}, for {what}"
        yield verdict(f"optional {name} on the nodes", sentence, (bool(lacking), status, advice))
