"""Optional parts of the installation: whether each can be used here, and if not, why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from async_flowrl.config.schema import Config
from async_flowrl.doctor.facts import importable
from async_flowrl.doctor.findings import FAILED, OK, SKIPPED, WARNING, Finding
from async_flowrl.doctor.machine import nccl_version
from async_flowrl.rewards import http_post
from async_flowrl.rewards.served import HTTP_NAME
from async_flowrl.rollout.vllm_omni import settings as vllm_omni
from checkpoint_engine.transports import NCCL, PYNCCL, resolve_transport

EXTRAS = {
    "serve-rewards": (("fastapi", "uvicorn", "python_multipart"), "serve"),
    "reward hps": (("ftfy",), "hps"),
}
"""Parts without a check of their own: the modules they need, and the extra of the package that installs them."""


@dataclass(frozen=True)
class Part:
    """An optional part. `what` is its purpose; `lack` returns why it cannot be used here, None if it can.

    `wanted` returns whether a configuration needs it.
    """

    what: str
    lack: Callable[[], str | None]
    wanted: Callable[[Config], bool]
    on_device: bool = False
    """True if it needs a GPU; the machine that starts a run on a cluster need not have one."""


def why_not(check: Callable[[], object]) -> str | None:
    """Returns the message of the ValueError that `check` raises, None if it raises none."""
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


def nccl() -> str | None:
    """Returns why torch cannot broadcast with NCCL here; None if it can."""
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} sees none"
    return None if dist.is_nccl_available() else f"torch {torch.__version__} was built without NCCL"


def pynccl() -> str | None:
    """Returns why cupy's NCCL cannot be used here; None if it can."""
    if not importable("cupy"):
        return "no cupy: pip install 'async-flowrl[nccl]' (CUDA 13) or 'async-flowrl[nccl-cuda12]'"
    if not torch.cuda.is_available():
        return f"cupy is here, but no CUDA device: torch {torch.__version__} sees none"
    return why_not(lambda: resolve_transport(PYNCCL, "cuda"))


def modules(names: tuple[str, ...], extra: str) -> str | None:
    """Returns which of the modules are missing and the command that installs them; None if none is missing."""
    missing = [name for name in names if not importable(name)]
    return f"no {' and no '.join(missing)}: pip install 'async-flowrl[{extra}]'" if missing else None


def asks_servers(config: Config) -> bool:
    """Returns True if any reward is behind HTTP, in a server that the run starts or in another one."""
    terms = (*config.reward.terms.values(), *config.evaluate.reward.terms.values())
    return any(term.serve is not None or term.name == HTTP_NAME for term in terms)


PARTS: Mapping[str, Part] = {
    "NCCL": Part("weights from GPU to GPU", nccl, lambda config: config.checkpoint_engine.transport == NCCL, True),
    "cupy": Part("transport pynccl", pynccl, lambda config: config.checkpoint_engine.transport == PYNCCL, True),
    "vllm-omni": Part(
        "rollout.engine=vllm_omni",
        lambda: why_not(vllm_omni.check_installed),
        lambda config: config.rollout.engine == "vllm_omni",
    ),
    "httpx and tenacity": Part("rewards behind HTTP", lambda: why_not(http_post.check_installed), asks_servers),
    **{
        what: Part(f"extra {extra}", lambda names=names, extra=extra: modules(names, extra), lambda config: False)  # type: ignore[misc]
        for what, (names, extra) in EXTRAS.items()
    },
}
"""Name of an optional part → the part."""


def optional_findings(config: Config | None = None) -> list[Finding]:
    """Returns one finding per part: ok or skipped, or failed if the configuration needs a part that is missing.

    It is a warning instead of a failure if the workers on a cluster need the part and this machine has no GPU.
    """
    return [finding_of(name, part, config) for name, part in PARTS.items()]


def finding_of(name: str, part: Part, config: Config | None) -> Finding:
    """Returns the finding on one part; `config` is the configuration that may need it, or None."""
    lack = part.lack()
    if lack is None:
        number = f" {nccl_version()}" if name == "NCCL" else ""
        return Finding(f"optional {name}", OK, f"here{number}, for {part.what}")
    if config is not None and part.wanted(config):
        if part.on_device and config.runtime.address is not None and not torch.cuda.is_available():
            return Finding(f"optional {name}", WARNING, lack, "the workers need it, and look when they start")
        return Finding(f"optional {name}", FAILED, lack, f"this configuration asks for it ({part.what})")
    return Finding(f"optional {name}", SKIPPED, lack, f"needed for {part.what} alone")
