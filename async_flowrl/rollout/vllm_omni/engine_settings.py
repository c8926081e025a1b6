"""Settings of the engine `vllm_omni`, for the rollout worker and the engine's ranks; it needs no vllm."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.lora import attach_lora, compute_dtypes, lora_parameters
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family
from async_flowrl.policies.stored import configuration

# Releases of vllm and vllm-omni that passed the tests; both packages must have the same one.  The interfaces used here
# change between releases.
RELEASES = ("0.30", "0.32")
MAX_RANK = 512  # Largest LoRA rank that vllm's layers support.
_MODELS = "vllm_omni.diffusion.models"
# Model family → class of vllm-omni's network.
FAMILIES = {
    "qwen_image": f"{_MODELS}.qwen_image.qwen_image_transformer:QwenImageTransformer2DModel",
    "sd3": f"{_MODELS}.sd3.sd3_transformer:SD3Transformer2DModel",
    "flux": f"{_MODELS}.flux.flux_transformer:FluxTransformer2DModel",
    "z_image": f"{_MODELS}.z_image.z_image_transformer:ZImageTransformer2DModel",
}
PIPELINE = "async_flowrl.rollout.vllm_omni.engine_pipeline.RolloutPipeline"
EXTENSION = "async_flowrl.rollout.vllm_omni.extension.RolloutWorkerExtension"
FAMILY = "family"  # Key of the model family in the pipeline's arguments, which reach every rank.
# Key, in the pipeline's arguments, of the port of the store at which the ranks form their process group.
STORE_PORT = "store_port"
REQUEST = "rollout_request"  # Key of the tickets in a request's extra arguments.
# Metadata group of an answer: {"active": version that the network used, "rollouts": images and trajectories}.
ROLLOUT = "rollout"


def check_installed() -> None:
    """Raises ValueError unless vllm and vllm-omni are installed in the same supported release."""
    supported, installed = " or ".join(RELEASES), {}
    for package in ("vllm", "vllm-omni"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            raise ValueError(
                f"rollout.engine=vllm_omni needs {package} {supported}, which is not installed: "
                "pip install 'async-flowrl[vllm-omni]'"
            ) from None
        if _release(installed[package]) not in RELEASES:
            raise ValueError(f"rollout.engine=vllm_omni needs {package} {supported}, found {installed[package]}")
    if len({_release(release) for release in installed.values()}) > 1:
        both = " and ".join(f"{package} {release}" for package, release in installed.items())
        raise ValueError(f"rollout.engine=vllm_omni needs vllm and vllm-omni of the same release, found {both}")


def _release(installed: str) -> str:
    return ".".join(installed.split(".")[:2])


def check_model(config: Config, model: ResolvedModel) -> None:
    """Raises ValueError if vllm-omni cannot generate with the model: its family, LoRA rank, or number of GPUs."""
    check_family(model.family)
    if config.lora.rank > MAX_RANK:
        raise ValueError(f"lora.rank must be at most {MAX_RANK} with rollout.engine=vllm_omni, got {config.lora.rank}")
    ranks = max(1, int(config.rollout.gpus_per_worker))
    network = configuration(model.path, "transformer", model.revision)
    spread = spread_sizes(model.family, network)
    if any(size % ranks for size in spread.values()):
        fitting = [count for count in range(1, min(spread.values()) + 1) if not any(s % count for s in spread.values())]
        nearest = min(fitting, key=lambda count: abs(count - ranks))
        parts = " and ".join(f"{size} {name}" for name, size in spread.items())
        raise ValueError(
            f"rollout.gpus_per_worker={ranks} spreads the network's {parts} over its GPUs, so it must divide them; "
            f"nearest: {nearest}"
        )


def spread_sizes(family: str, network: Mapping[str, Any]) -> dict[str, int]:
    """Returns name → size of what ranks divide evenly among them, from `network`, its configuration file."""
    heads = network.get("n_heads", network.get("num_attention_heads"))
    spread = {} if heads is None else {"attention heads": int(heads)}
    if family == "z_image" and "dim" in network:
        spread["MLP columns"] = int(network["dim"] / 3 * 8)
    if family == "z_image" and {"in_channels", "all_patch_size", "all_f_patch_size"} <= network.keys():
        patches = zip(network["all_patch_size"], network["all_f_patch_size"], strict=True)
        spread["outputs per token"] = math.gcd(*(side**2 * frames * network["in_channels"] for side, frames in patches))
    return spread


def check_family(family: str) -> None:
    if family not in FAMILIES:
        raise ValueError(
            f"rollout.engine=vllm_omni generates with {', '.join(FAMILIES)}, the model is {family}: use "
            "rollout.engine=diffusers"
        )


def tensor_parallel(gpus_per_worker: float, devices: int) -> int:
    """Returns the number of ranks of a worker's network, one per GPU. Raises ValueError for too few `devices`."""
    if gpus_per_worker <= 1 or devices == 0:
        return 1
    if devices < gpus_per_worker:
        raise ValueError(f"rollout.gpus_per_worker={gpus_per_worker:g}, but the worker sees {devices} devices")
    return int(gpus_per_worker)


def engine_arguments(config: Config, *, folder: str, family: str, ranks: int, port: int) -> dict[str, Any]:
    """Returns the arguments of `AsyncOmni`; its `ranks` meet at the TCP store on `port` of the rollout worker."""
    check_family(family)
    return {
        "model": folder,
        "dtype": config.model.dtype,
        "tensor_parallel_size": ranks,
        # Only vllm-omni's output processing for Qwen-Image passes on the metadata beside a pipeline's images.
        "model_class_name": "QwenImagePipeline",
        "custom_pipeline_args": {"pipeline_class": PIPELINE, FAMILY: family, STORE_PORT: port},
        "worker_extension_cls": EXTENSION,
        # One request has all tickets of a batch, because vllm-omni's own batches depend on when requests arrive.
        "max_num_seqs": 1,
        # The versions that a ticket may name, one for evaluation, and one for the check that layers use their adapter.
        "max_cpu_loras": config.live_versions + 2,
        "enforce_eager": True,
        "cache_backend": "none",
        "log_stats": False,
        "stage_init_timeout": int(config.deadlines.load),
        "init_timeout": int(config.deadlines.load),
    }


_OUTPUT = re.compile(r"\.to_out\.0(?=\.|$)")

Shape = tuple[int, ...]
# Function of (local shard, dimension) that returns the shards of all ranks, concatenated along the dimension.
Gather = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class NetworkShapes:
    """Shapes of a network's parameters, by the names of diffusers."""

    adapter: dict[str, Shape]  # Shapes of the adapter's (LoRA's) tensors.
    base: dict[str, Shape]  # Shapes of the base weights.
    dtypes: dict[str, torch.dtype]  # Dtypes of the adapter's tensors.
    config: dict[str, Any]  # Configuration of the diffusers network, with its defaults.

    def empty_adapter(self) -> dict[str, Tensor]:
        """Returns zero tensors in host memory, into which a version of the adapter fits."""
        return {name: torch.zeros(shape, dtype=self.dtypes[name]) for name, shape in self.adapter.items()}


def network_shapes(config: Config, model: ResolvedModel) -> NetworkShapes:
    """Returns the shapes by the model's configuration files. Raises ValueError if `lora.targets` names no layer."""
    policy = load_family(model.family).load(
        model.path, dtype=DTYPES[model.dtype], device=torch.device("cpu"), parts="structure", revision=model.revision
    )
    base = _shapes(policy.transformer.named_parameters())
    attach_lora(policy.transformer, config.lora, policy)
    adapter = _shapes(lora_parameters(policy.transformer).items())
    described: Any = policy.transformer.config
    return NetworkShapes(adapter, base, compute_dtypes(policy.transformer), dict(described))


def _shapes(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in parameters}


@dataclass(frozen=True)
class Names:
    """Translation of diffusers' names of modules and parameters to those of vllm-omni's network (the engine's)."""

    # Packed module → its parts, from the engine, such as {"to_qkv": ["to_q", "to_k", "to_v"]}.
    packed: Mapping[str, Sequence[str]]
    flat: bool  # Whether the engine names an attention's `to_out.0` `to_out`.

    def engine(self, name: str) -> str:
        """Returns the engine's name of a module or parameter that is not packed."""
        return _OUTPUT.sub(".to_out", name) if self.flat else name

    def key(self, name: str) -> str:
        """Returns the key under which vllm's LoRA loader reads a tensor of the adapter."""
        return f"base_model.model.transformer.{self.engine(name)}"

    def slice(self, name: str) -> tuple[str, int]:
        """Returns the engine's module that holds module `name`, and its slice in it; 0 if the module is not packed."""
        prefix, _, leaf = name.rpartition(".")
        for whole, parts in self.packed.items():
            if leaf in parts:
                return f"{prefix}.{whole}", list(parts).index(leaf)
        return self.engine(name), 0


class Unpacked(Mapping[str, Tensor]):
    """The engine's parameters under diffusers' names and in its shapes, each joined from all shards when it is read.

    All ranks must read the same names in the same order; one that fails alone leaves the others waiting in `gather`.
    Nothing keeps what was joined: the ranks may have room for no more than their shares.
    """

    def __init__(self, live: Mapping[str, Tensor], shapes: Mapping[str, Shape], names: Names, gather: Gather) -> None:
        """`live` are this rank's parameters, `shapes` the whole ones', and `gather` joins shards."""
        self._shapes, self._names, self._gather, packed = shapes, names, gather, names.packed
        self._shards = {
            part: shard for name, each in live.items() for part, shard in _parts(name, each, shapes, packed)
        }

    def __getitem__(self, name: str) -> Tensor:
        """Raises ValueError if the engine has no such parameter, or has it in another shape."""
        return _whole(name, self._shards.get(self._names.engine(name)), self._shapes[name], self._gather)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _parts(
    name: str, tensor: Tensor, shapes: Mapping[str, Shape], packed: Mapping[str, Sequence[str]]
) -> Iterable[tuple[str, Tensor]]:
    """Splits the engine's parameter into the parts that it packs; the rows of each part are sharded evenly."""
    module, _, leaf = name.rpartition(".")
    prefix, _, whole = module.rpartition(".")
    if whole not in packed:
        return [(name, tensor)]
    parts = [f"{prefix}.{part}.{leaf}" for part in packed[whole]]
    rows = [shapes[part][0] for part in parts]
    ranks = sum(rows) // len(tensor)
    return zip(parts, tensor.split_with_sizes([count // ranks for count in rows]), strict=True)


def _whole(name: str, tensor: Tensor | None, shape: Shape, gather: Gather) -> Tensor:
    if tensor is None:
        raise ValueError(f"vllm-omni's network has no parameter for {name}")
    for dimension, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = gather(tensor.contiguous(), dimension)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"vllm-omni's network holds {name} as {list(tensor.shape)}, expected {list(shape)}")
    return tensor
