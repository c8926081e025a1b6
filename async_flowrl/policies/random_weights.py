"""`model.weights=random`: a model of published size whose weights are drawn from seeds on the device, without files.

Each tensor's seed is its name, so that all processes on one kind of device draw the same bits, in whatever order. Text
encoders are left out: prompts get random embeddings of the right shape.
"""

import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from async_flowrl.config.models import Architecture
from async_flowrl.config.paths import cache_dir
from async_flowrl.policies.pipeline import PipelinePolicy, estimated_tokens
from async_flowrl.policies.pipeline_family import PipelineFamily, euler_scheduler, structure
from async_flowrl.policies.quantizer import Quantizer
from async_flowrl.policies.stored import EXPERTS, FOLDER, Weights, boundary_ratio, configuration, fill
from async_flowrl.policies.tiny import cached
from async_flowrl.types import Conditioning, EncoderInput, TextWithImages, identity


class RandomWeights(Weights):
    """The tensors of a network that is on the meta device, by name, each drawn anew at each access, on the device.

    Norms are 1, biases 0, and matrices and kernels N(0, 1 / inputs). A buffer has the value that its class computes.
    """

    def __init__(self, network: nn.Module) -> None:
        self.sources = cast("Any", network).state_dict(keep_vars=True)

    def __getitem__(self, name: str) -> Tensor:
        source: Tensor = self.sources[name]
        if not source.is_meta:
            return source.detach()
        # Where there is a device, whoever asks for host memory gets the bits of the device.
        drawn = torch.empty(source.shape, dtype=source.dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        if (inputs := math.prod(drawn.shape[1:])) == 1:
            return drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator(drawn.device).manual_seed(_seed(name))
        return drawn.normal_(0.0, inputs**-0.5, generator=generator)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def random_weights(family: PipelineFamily, path: str, dtype: torch.dtype) -> RandomWeights:
    return RandomWeights(family.structure(path, dtype))


def random_policy(
    family: PipelineFamily,
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    parts: str,
    longest: int | None,
    quantizer: Quantizer,
) -> PipelinePolicy:
    """Returns what `family.load` returns for the configuration files at `path`; `longest` is `max_sequence_length`."""
    import diffusers

    options: dict[str, Any] = {"max_sequence_length": longest, **quantizer.options}
    policy = family.load(path, dtype=dtype, device=device, parts="structure", **options)
    if parts == "structure":
        return policy
    network = policy.transformer
    if parts != "vae":
        fill(network, quantizer.weights(), device)
    if parts == "transformer":
        return policy
    config, stock = configuration(path, "vae"), getattr(diffusers, family.pipeline)
    vae = structure(getattr(diffusers, config["_class_name"]), config, dtype)
    fill(vae, RandomWeights(vae), device)
    parameters = inspect.signature(stock).parameters
    nothing = dict.fromkeys(name for name, parameter in parameters.items() if parameter.default is parameter.empty)
    loaded: dict[str, Any] = {**family.components(network), "vae": vae, "scheduler": euler_scheduler(path)}
    if (ratio := boundary_ratio(path)) is not None:
        loaded["boundary_ratio"] = ratio
    pipeline = stock(**nothing | family.own_parts(None) | loaded)
    policy = family.around(pipeline, dtype, max_sequence_length=longest)
    cast("Any", policy).encode = MethodType(_encode, policy)
    return policy


def _encode(
    policy: PipelinePolicy, texts: Sequence[EncoderInput], system: str | None = None, *, negative: bool = False
) -> list[Conditioning]:
    """Replaces `Policy.encode`: embeddings N(0, 1) of about as many tokens as the text has."""
    embedded: list[Conditioning] = []
    for text in texts:
        policy.planned_tokens = estimated_tokens(text)
        policy.planned_images = len(text.images) if isinstance(text, TextWithImages) else 0
        if isinstance(text, TextWithImages) and text.size is not None:
            policy.planned_size = text.size
        draw = np.random.default_rng(_seed(repr((identity(text), system, negative))))
        embedded.append(
            {
                name: np.ones(shape, np.float32) if name.endswith("mask") else draw.standard_normal(shape, np.float32)
                for name, shape in policy.conditioning_shapes().items()
            }
        )
    return embedded


def described_folder(name: str, architecture: Architecture, family: PipelineFamily) -> Path:
    """Returns a diffusers folder with the configuration files of a published model, and nothing else; it is cached."""
    import diffusers

    network, ratio = getattr(diffusers, family.transformer), architecture.boundary_ratio
    networks = (FOLDER,) if ratio is None else EXPERTS
    files: dict[str, dict[str, Any]] = {
        "model_index": {"_class_name": family.pipeline, **{of: ["diffusers", family.transformer] for of in networks}},
        **{f"{folder}/config": _with_defaults(network, architecture.transformer) for folder in networks},
        "vae/config": _with_defaults(getattr(diffusers, architecture.vae["_class_name"]), architecture.vae),
        "scheduler/scheduler_config": dict(architecture.scheduler or {}),
    }
    if ratio is not None:
        files["model_index"]["boundary_ratio"] = ratio

    def build(folder: Path) -> None:
        for file, content in files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / f"{file}.json").write_text(json.dumps(content, indent=2))

    key = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
    return cached(cache_dir() / f"random-{name.replace('/', '--')}-{key}", build)


def _with_defaults(kind: type, config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    usual = {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
    return {**usual, **config, "_class_name": kind.__name__}
