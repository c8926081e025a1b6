"""From our configuration to vllm-omni's arguments, and the versions that belong together."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_flowrl.config.schema import Config

RELEASE = "0.30"
"""vllm and vllm-omni come in pairs, and the seams used here move between releases."""
FAMILIES = {"qwen_image": "async_flowrl.rollout.vllm_omni.pipeline.RolloutQwenImagePipeline"}
"""Model family to the pipeline that vllm-omni runs for us."""
STORE_PORT = "store_port"
"""Among the pipeline's arguments, which reach every rank's process."""
EXTENSION = "async_flowrl.rollout.vllm_omni.extension.RolloutWorkerExtension"


def check_installed() -> None:
    """Raises ValueError, saying what to install, unless both packages are there in the one release supported."""
    for package in ("vllm", "vllm-omni"):
        try:
            found = version(package)
        except PackageNotFoundError:
            raise ValueError(
                f"rollout.engine=vllm_omni needs {package} {RELEASE}, which is not installed: "
                "pip install 'async-flowrl[vllm-omni]'"
            ) from None
        if not found.startswith(f"{RELEASE}."):
            raise ValueError(f"rollout.engine=vllm_omni needs {package} {RELEASE}, found {found}")


def tensor_parallel(gpus_per_worker: float, devices: int) -> int:
    """How many devices a rollout worker's engine spreads its network over: all that the worker was given.

    Raises ValueError for a part of a device beside whole ones, and where fewer devices are visible than asked for.
    """
    if gpus_per_worker <= 1 or devices == 0:
        return 1
    if gpus_per_worker != int(gpus_per_worker):
        raise ValueError(f"rollout.gpus_per_worker above 1 must be a whole number, got {gpus_per_worker:g}")
    if devices < gpus_per_worker:
        raise ValueError(f"rollout.gpus_per_worker={gpus_per_worker:g}, but the worker sees {devices} devices")
    return int(gpus_per_worker)


def check_family(family: str) -> None:
    """Raises ValueError for a model family that there is no pipeline for."""
    if family not in FAMILIES:
        raise ValueError(f"rollout.engine=vllm_omni generates with {', '.join(FAMILIES)}, the model is {family}")


def engine_arguments(config: Config, *, folder: str, family: str, devices: int, port: int) -> dict[str, Any]:
    """Keyword arguments of `AsyncOmni`; every one is named here, none is left to the environment.

    One request is one whole ticket, so `max_num_seqs` is 1: the engine never puts two tickets into one forward pass.
    `port` is where the rollout worker holds a store for the engine's ranks to meet at.
    """
    check_family(family)
    return {
        "model": folder,
        "dtype": config.model.dtype,
        "tensor_parallel_size": tensor_parallel(config.rollout.gpus_per_worker, devices),
        "custom_pipeline_args": {"pipeline_class": FAMILIES[family], STORE_PORT: port},
        "worker_extension_cls": EXTENSION,
        "max_num_seqs": 1,
        "max_cpu_loras": resident_adapters(config),
        "enforce_eager": True,
        "cache_backend": "none",
        "log_stats": False,
        "stage_init_timeout": int(config.deadlines.load),
        "init_timeout": int(config.deadlines.load),
    }


def resident_adapters(config: Config) -> int:
    """The versions a ticket may name, one for evaluation, and the canary of the binding proof."""
    return config.max_staleness + 3
