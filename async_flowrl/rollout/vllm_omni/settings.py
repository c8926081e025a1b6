"""Settings of vllm-omni: its arguments, the releases that belong together, and the keys that both sides know."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_flowrl.config.schema import Config

RELEASE = "0.30"
"""vllm and vllm-omni come in pairs, and the seams used here move between releases."""
FAMILIES = {"qwen_image": "async_flowrl.rollout.vllm_omni.pipeline.RolloutQwenImagePipeline"}
"""Model family to the pipeline class that vllm-omni runs."""
EXTENSION = "async_flowrl.rollout.vllm_omni.extension.RolloutWorkerExtension"
STORE_PORT = "store_port"
"""Key of the ranks' meeting point among the pipeline's arguments, which reach every rank's process."""
REQUEST = "rollout_request"
"""Key of the ticket among a request's extra arguments."""
ROLLOUT = "rollout"
"""Metadata group of the answer: {"active": what the network carried, "rollout": images and trajectory}."""


def check_installed() -> None:
    """Raises ValueError, saying what to install, unless both packages are there in the one release supported."""
    for package in ("vllm", "vllm-omni"):
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise ValueError(
                f"rollout.engine=vllm_omni needs {package} {RELEASE}, which is not installed: "
                "pip install 'async-flowrl[vllm-omni]'"
            ) from None
        if not installed.startswith(f"{RELEASE}."):
            raise ValueError(f"rollout.engine=vllm_omni needs {package} {RELEASE}, found {installed}")


def check_family(family: str) -> None:
    """Raises ValueError for a model family that there is no pipeline for."""
    if family not in FAMILIES:
        raise ValueError(f"rollout.engine=vllm_omni generates with {', '.join(FAMILIES)}, the model is {family}")


def tensor_parallel(gpus_per_worker: float, devices: int) -> int:
    """The ranks that a rollout worker's engine spreads its network over: one per device that the worker was given.

    Raises ValueError where fewer devices are visible than asked for.
    """
    if gpus_per_worker <= 1 or devices == 0:
        return 1
    if devices < gpus_per_worker:
        raise ValueError(f"rollout.gpus_per_worker={gpus_per_worker:g}, but the worker sees {devices} devices")
    return int(gpus_per_worker)


def engine_arguments(config: Config, *, folder: str, family: str, ranks: int, port: int) -> dict[str, Any]:
    """Keyword arguments of `AsyncOmni`; every one is named here, none is left to the environment.

    `port` is where the rollout worker holds a store for the engine's `ranks` to meet at.
    """
    check_family(family)
    return {
        "model": folder,
        "dtype": config.model.dtype,
        "tensor_parallel_size": ranks,
        "custom_pipeline_args": {"pipeline_class": FAMILIES[family], STORE_PORT: port},
        "worker_extension_cls": EXTENSION,
        # One request is one whole ticket, so the engine never puts two tickets into one forward pass.
        "max_num_seqs": 1,
        # The versions a ticket may name, one for evaluation, and the canary of the binding proof.
        "max_cpu_loras": config.live_versions + 2,
        "enforce_eager": True,
        "cache_backend": "none",
        "log_stats": False,
        "stage_init_timeout": int(config.deadlines.load),
        "init_timeout": int(config.deadlines.load),
    }
