"""Software and devices as torch sees them, and optional features: what each needs, and which pools need it."""

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from async_flowrl.config.placement import placement_of
from async_flowrl.config.pools import ROLLOUT, held_out_by_pool, scoring_pools, served_terms, server_pool
from async_flowrl.config.schema import Config
from async_flowrl.rollout.vllm_omni.settings import check_installed
from async_flowrl.run.findings import FAILED, SKIPPED, WARNING, Finding, verdict
from async_flowrl.run.machines import GIB, PACKAGES, Machine, importable, room_for, version
from checkpoint_engine.transports import NCCL, PYNCCL, resolve_transport
from separation.group import PoolSpec

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # Distributions that provide the module cupy.
# First compute capability whose tensor cores multiply bfloat16; least free share of the memory of a device that no
# other program uses.
LEAST_CAPABILITY, MIN_FREE_SHARE = (8, 0), 0.9
SERVE_MODULES = ("fastapi", "uvicorn", "python_multipart")
HPS_REWARDS = ("hpsv2", "hpsv2.1")
# Command that starts this package's own reward server, unless uv makes an environment for it.
OWN_SERVER = re.compile(r"(?!uv ).*serve[-_]rewards")


def software() -> dict[str, str]:
    """Returns name → version of Python, of the installed packages that matter, and of the CUDA libraries of torch."""
    versions = {name: version(name) for name in ("async-flowrl", *PACKAGES, *CUPY)}
    versions = {"Python": platform.python_version(), **versions}
    versions |= {"torch": torch.__version__, "CUDA": str(torch.version.cuda or "none")}
    if torch.version.cuda is not None and dist.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: number for name, number in versions.items() if number != "none"}


def device_findings() -> Iterator[Finding]:
    """Describes each device: failed without bfloat16 tensor cores, a warning if another program uses its memory."""
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
    # Returns the names of the pools whose workers need it in a configuration; empty if none does.
    needed_by: Callable[[Config], Sequence[str]]
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


def weights_by(transport: str, config: Config) -> list[str]:
    return list(placement_of(config).pools) if config.checkpoint_engine.transport == transport else []


def made_by_vllm_omni(config: Config) -> list[str]:
    return [ROLLOUT] if config.rollout.engine == "vllm_omni" else []


def scored_by_hps(config: Config) -> list[str]:
    held_out, pools = held_out_by_pool(config), scoring_pools(config)
    terms = {pool.name: {**pool.config(config.reward).terms, **held_out.get(pool.name, {})} for pool in pools}
    return [
        pool for pool, rewards in terms.items() if any((one.name or key) in HPS_REWARDS for key, one in rewards.items())
    ]


def own_servers(config: Config) -> list[str]:
    commands = {term: serve.command or () for term, serve in served_terms(config)}
    texts = {term: words if isinstance(words, str) else " ".join(map(str, words)) for term, words in commands.items()}
    return [server_pool(term) for term, text in texts.items() if OWN_SERVER.match(text)]


# Name of an optional feature → the feature.
FEATURES = {
    "NCCL": Feature("transport nccl", partial(resolve_transport, NCCL, "cuda"), partial(weights_by, NCCL), True),
    "cupy": Feature("transport pynccl", partial(resolve_transport, PYNCCL, "cuda"), partial(weights_by, PYNCCL), True),
    "vllm-omni": Feature("rollout.engine=vllm_omni", check_installed, made_by_vllm_omni),
    "serve-rewards": Feature("extra serve", partial(modules, "serve", *SERVE_MODULES), own_servers),
    "reward hps": Feature("extra hps", partial(modules, "hps", "ftfy"), scored_by_hps),
}


def missing(names: Sequence[str]) -> dict[str, str]:
    # The doctor calls it on every node. GPUs do not count, because the calling process may have been given none.
    return {name: lack for name in names if (lack := FEATURES[name].lack()) is not None}


def needed(config: Config) -> dict[str, Sequence[str]]:
    return {name: pools for name, feature in FEATURES.items() if (pools := feature.needed_by(config))}


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


def feature_findings(config: Config, specs: Sequence[PoolSpec], machines: Sequence[Machine]) -> Iterator[Finding]:
    """Yields one finding per optional feature that the configuration needs on a cluster."""
    # It is a failure if a node lacks the feature and has room for a worker that needs it, because Ray may choose that
    # node. Other nodes need nothing: the head of a cluster of GPUs, for example, need not have cupy.
    room = {spec.name: room_for(spec, machines) for spec in specs}
    for name, pools in needed(config).items():
        feature = FEATURES[name]
        homes = {one.name: [pool for pool in pools if one in room[pool]] for one in machines}
        sentence = "; ".join(
            f"{one.name} (room for {', '.join(homes[one.name])}): {one.lacks.get(name, 'no GPU')}"
            for one in machines
            if homes[one.name] and (name in one.lacks or (feature.on_device and not one.has_gpu))
        )
        everywhere = f"on every node with room for workers that need it, for {feature.what}"
        homeless = not any(homes.values()), SKIPPED, "no node has such room"
        advice = f"needed for {feature.what}: install it there, or start Ray there without room"
        yield verdict(
            f"optional {name} on the nodes", sentence or everywhere, homeless, (bool(sentence), FAILED, advice)
        )
