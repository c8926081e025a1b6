"""Settings of vllm-omni: its arguments, the releases that belong together, and the keys that both sides know."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.policies.stored import configuration

RELEASE = "0.30"
"""vllm and vllm-omni come in pairs, and the seams used here move between releases."""
MAX_RANK = 512
"""The largest rank that vllm's LoRA layers are made for."""
_MODELS = "vllm_omni.diffusion.models"
FAMILIES = {
    "qwen_image": f"{_MODELS}.qwen_image.qwen_image_transformer:QwenImageTransformer2DModel",
    "sd3": f"{_MODELS}.sd3.sd3_transformer:SD3Transformer2DModel",
    "flux": f"{_MODELS}.flux.flux_transformer:FluxTransformer2DModel",
    "z_image": f"{_MODELS}.z_image.z_image_transformer:ZImageTransformer2DModel",
}
"""Model family to vllm-omni's network."""
PIPELINE = "async_flowrl.rollout.vllm_omni.pipeline.RolloutPipeline"
EXTENSION = "async_flowrl.rollout.vllm_omni.extension.RolloutWorkerExtension"
FAMILY = "family"
"""Key of the model family among the pipeline's arguments, which reach every rank's process."""
STORE_PORT = "store_port"
"""Key of the ranks' meeting point among them."""
REQUEST = "rollout_request"
"""Key of the tickets among a request's extra arguments."""
ROLLOUT = "rollout"
"""Metadata group of the answer: {"active": what the network carried, "rollouts": images and trajectories}."""


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


def check_model(config: Config, model: ResolvedModel) -> None:
    """Raises ValueError, one sentence, for a family that vllm-omni has no network for, and for tensor parallelism or a
    rank of the adapter that its network does not take. Reads the network's configuration, nothing of vllm."""
    check_family(model.family)
    if config.lora.rank > MAX_RANK:
        raise ValueError(f"lora.rank must be at most {MAX_RANK} with rollout.engine=vllm_omni, got {config.lora.rank}")
    ranks = max(1, int(config.rollout.gpus_per_worker))
    network = configuration(model.path, "transformer", model.revision)
    heads = int(network.get("n_heads", network.get("num_attention_heads", ranks)))
    if heads % ranks:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0]
        nearest = min(fitting, key=lambda count: abs(count - ranks))
        raise ValueError(
            f"rollout.gpus_per_worker={ranks} spreads the network's {heads} attention heads over its GPUs, so it must "
            f"divide them; nearest: {nearest}"
        )


def check_family(family: str) -> None:
    """Raises ValueError for a model family that vllm-omni has no network for."""
    if family not in FAMILIES:
        raise ValueError(
            f"rollout.engine=vllm_omni generates with {', '.join(FAMILIES)}, the model is {family}: use "
            "rollout.engine=diffusers"
        )


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
        # Of vllm-omni's own output processing only that of Qwen-Image hands on what a pipeline put beside its images.
        "model_class_name": "QwenImagePipeline",
        "custom_pipeline_args": {"pipeline_class": PIPELINE, FAMILY: family, STORE_PORT: port},
        "worker_extension_cls": EXTENSION,
        # One request is all the tickets of a batch: vllm-omni's own batches depend on which requests have come in time.
        "max_num_seqs": 1,
        # The versions a ticket may name, one for evaluation, and the canary of the binding proof.
        "max_cpu_loras": config.live_versions + 2,
        "enforce_eager": True,
        "cache_backend": "none",
        "log_stats": False,
        "stage_init_timeout": int(config.deadlines.load),
        "init_timeout": int(config.deadlines.load),
    }
