"""The LoRA on a policy's transformer: how it is attached, listed, switched off, and loaded.

A layout name is the name of a tensor in the exported LoRA file without its prefix. PEFT takes seconds to import, so
only the functions that need it import it.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.config.check import check_fields
from async_flowrl.config.error_text import did_you_mean
from async_flowrl.config.paths import expanded
from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.lora_layer import ADAPTER, compute_copies, compute_dtype, lora_linear
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.stored import check_fits
from async_flowrl.seeds import derive, generator, untouched_rng

# Parts that torch.compile, gradient checkpointing and FSDP insert into the names of modules.
_WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def add_lora(transformer: nn.Module, config: LoraConfig, policy: PipelinePolicy, seed: int) -> None:
    """Attaches a LoRA as PEFT adapter `default`, float32, with initial values, and freezes all other parameters.

    Call it before torch.compile and FSDP. Raises ValueError as `targeted_modules`, and for values out of bounds.
    """
    attach_lora(transformer, config, policy)
    for layer in lora_modules(transformer).values():
        for side in (cast("Any", layer).lora_A[ADAPTER], cast("Any", layer).lora_B[ADAPTER]):
            if side.weight.is_meta:
                side.to_empty(device="cpu")
    initialise(transformer, seed)


def attach_lora(transformer: nn.Module, config: LoraConfig, policy: PipelinePolicy) -> None:
    """Attaches the LoRA without initial values, also to a transformer on the meta device; raises as `add_lora`."""
    import peft

    check_fields(config, "lora.")
    transformer.requires_grad_(False)
    targets = targeted_modules(transformer, config, policy)
    sizes = {"r": config.rank, "lora_alpha": config.alpha}
    adapter = peft.LoraConfig(target_modules=targets, lora_dropout=0.0, bias="none", **sizes)
    adapter._register_custom_module({nn.Linear: lora_linear()})  # documented under PEFT's "custom models"
    # PEFT draws initial values in host memory, also where it then puts the layers on the meta device.
    shapes_only = all(parameter.is_meta for parameter in transformer.parameters())
    with untouched_rng(), torch.device("meta") if shapes_only else nullcontext():
        cast("Any", transformer).add_adapter(adapter, adapter_name=ADAPTER)
    for parameter in lora_parameters(transformer).values():
        parameter.data = parameter.data.to(torch.float32)


def targeted_modules(transformer: nn.Module, config: LoraConfig, policy: PipelinePolicy) -> list[str]:
    """Returns the sorted names of the layers that get a LoRA. ValueError for a target without any, or if none is."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    targets = policy.lora_targets if config.targets is None else config.targets
    if not targets:
        raise ValueError("lora.targets is empty; leave it out for the model family's default list")
    chosen: set[str] = set()
    for target in targets:
        matches = {name for name in linear if name == target or name.endswith(f".{target}")}
        if not matches:
            suffixes = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in linear})
            hint = did_you_mean(target, suffixes, shown=str)
            raise ValueError(f"lora.targets: {target!r} names no linear layer of the model, e.g. {suffixes[0]}{hint}")
        chosen |= matches
    chosen = {name for name in chosen if not re.fullmatch(policy.lora_exclude or "", name)}
    if not chosen:
        raise ValueError(f"lora.targets {list(targets)} name only layers that cannot change the model's output")
    if without := [name for name in policy.experts if not any(layer.startswith(f"{name}.") for layer in chosen)]:
        raise ValueError(f"lora.targets {list(targets)} name no layer of {without[0]}: each expert needs one")
    return sorted(chosen)


def initialise(transformer: nn.Module, seed: int) -> None:
    """Sets A ~ N(0, 1/rank²) and B = 0 in place; each tensor's values depend only on `seed` and its name."""
    with torch.no_grad():
        for name, parameter in lora_parameters(transformer).items():
            if name.endswith(".lora_A.weight"):
                drawn = torch.randn(parameter.shape, generator=generator(derive(seed, "lora", name)))
                parameter.copy_(drawn / len(parameter))
            else:
                parameter.zero_()


def plain_name(name: str) -> str:
    return _WRAPPERS.sub("", name)


def lora_modules(transformer: nn.Module) -> dict[str, nn.Module]:
    """Returns the LoRA layers by module name, sorted; torch.compile and FSDP do not change the names."""
    from peft.tuners.lora import LoraLayer

    layers = {plain_name(name): module for name, module in transformer.named_modules() if isinstance(module, LoraLayer)}
    return dict(sorted(layers.items()))


def lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    parameters = {
        f"{name}.lora_{side}.weight": getattr(layer, f"lora_{side}")[ADAPTER].weight
        for name, layer in lora_modules(transformer).items()
        for side in "AB"
    }
    return dict(sorted(parameters.items()))


def lora_layers(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Returns `compute_copies` of each layer, for the binding proof (the check that the network uses these weights)."""
    return {name: compute_copies(module) for name, module in modules.items()}


def compute_dtypes(transformer: nn.Module) -> dict[str, torch.dtype]:
    """Returns by layout name the dtype in which the network computes with a tensor; versions are sent in it, too."""
    layers = {name: compute_dtype(layer) for name, layer in lora_modules(transformer).items()}
    return {f"{name}.lora_{side}.weight": dtype for name, dtype in sorted(layers.items()) for side in "AB"}


def keep_compute_copies(transformer: nn.Module) -> None:
    """Casts the LoRA's tensors to `compute_dtypes`, in processes whose optimizer needs no float32 weights."""
    dtypes = compute_dtypes(transformer)
    for name, parameter in lora_parameters(transformer).items():
        parameter.data = parameter.data.to(dtypes[name])


@contextmanager
def reference_mode(transformer: nn.Module) -> Iterator[None]:
    """Context manager: switches the LoRA off, so the network is exactly the base model; works with compile and FSDP."""
    # PEFT's own switch also changes `requires_grad` of the LoRA, which breaks FSDP and graphs that await a backward
    # pass.
    layers = [cast("Any", layer) for layer in lora_modules(transformer).values()]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer._disable_adapters = value


def load_warm_start(transformer: nn.Module, config: LoraConfig, policy: PipelinePolicy) -> None:
    """Copies the LoRA of `lora.path` into the attached one. Raises ValueError for another rank, other layers or NaN."""
    where, source = f"lora.path {config.path}", lora_file.read(expanded(str(config.path)), "lora.path")
    if source.rank != config.rank:
        raise ValueError(f"{where} has rank {source.rank}, lora.rank={config.rank}: make them equal")
    tensors = _fitting(source, where, config, policy)
    with torch.no_grad():
        for name, parameter in lora_parameters(transformer).items():
            parameter.copy_(tensors[name])


def read_teacher(label: str, path: str, config: LoraConfig, policy: PipelinePolicy) -> dict[str, Tensor]:
    """Returns the tensors of a LoRA by layout name, as the attached one would compute them. ValueError if it is unfit.

    A smaller rank is filled with zeros, which changes no output.
    """
    where = f"algorithm.teachers.{label} {path}"
    source = lora_file.read(expanded(path), f"algorithm.teachers.{label}")
    if source.rank > config.rank:
        raise ValueError(f"{where} has rank {source.rank}, more than lora.rank={config.rank}")
    return _fitting(source.with_rank(config.rank), where, config, policy)


def _fitting(source: lora_file.LoraFile, where: str, config: LoraConfig, policy: PipelinePolicy) -> dict[str, Tensor]:
    # Layers that cannot change the output (`policy.lora_exclude`) are ignored.
    lora_file.check_finite(source.tensors, where)
    tensors, excluded = source.with_alpha(config.alpha).tensors, re.compile(policy.lora_exclude or "")
    tensors = {n: t for n, t in tensors.items() if not excluded.fullmatch(lora_file.module_name(n))}
    parameters = lora_parameters(policy.transformer)
    check_fits(where, tensors, parameters, all_of=True, what="lora.targets of the model")
    return tensors
