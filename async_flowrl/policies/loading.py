"""Loading of weights, alike for every model family."""

import inspect
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import nn

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
"""A pipeline's names of them."""
ONE_AT_A_TIME = threading.Lock()
"""diffusers, transformers and peft switch process-wide defaults while they build a model: threads of one process must
take turns, and one that computes meanwhile must name the dtype of every tensor that it makes of numbers."""


def weight_options(dtype: torch.dtype, revision: str | None) -> dict[str, Any]:
    """Keyword arguments of every `from_pretrained`: safetensors only, never code from a model repository."""
    import diffusers

    name = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"
    return {name: dtype, "revision": revision, "use_safetensors": True}


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of diffusers and transformers inside: a dozen processes load at once."""
    import diffusers
    import transformers

    loggers = (diffusers.utils.logging, transformers.utils.logging)
    shown = [logger for logger in loggers if logger.is_progress_bar_enabled()]
    for logger in shown:
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger in shown:
            logger.enable_progress_bar()


def load_without_text(stock: Any, path: str, device: torch.device, **options: Any) -> Any:
    """The same pipeline without text encoders, which then are neither on the device nor in host memory."""
    names = [name for name in TEXT_ENCODERS if name in inspect.signature(stock).parameters]
    return load_whole(stock, path, device, text_on_host=False, **dict.fromkeys(names), **options)


def load_text(stock: Any, path: str, device: torch.device, transformer: nn.Module, **options: Any) -> Any:
    """The pipeline with tokenizers and text encoders alone, and with `transformer`, which some of them ask."""
    pipeline = load_whole(stock, path, device, text_on_host=False, vae=None, transformer=None, **options)
    pipeline.register_modules(transformer=transformer)
    return pipeline


def load_whole(stock: Any, path: str, device: torch.device, *, text_on_host: bool, **options: Any) -> Any:
    """The pipeline of class `stock`, settled: its weights go straight to `device`, or stay in host memory if
    `text_on_host` and they are a text encoder's."""
    given: dict[str, Any] = {}
    if text_on_host:
        others = options | {"transformer": None, "vae": None}
        text = stock.from_pretrained(path, trust_remote_code=False, **others)
        settle_pipeline(text, torch.device("cpu"))
        given = {name: part for name, part in text.components.items() if part is not None}
    pipeline = stock.from_pretrained(path, device_map=device.type, trust_remote_code=False, **given, **options)
    settle_pipeline(pipeline, device, except_for=given)
    return pipeline


def settle_pipeline(pipeline: Any, device: torch.device, *, except_for: Container[str] = ()) -> None:
    """Settles the networks among its components, but for those named."""
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in except_for:
            settle(component, device)


def settle(module: nn.Module, device: torch.device) -> None:
    """Frozen, in eval mode, on `device`, in memory of torch's own.

    Memory-mapped safetensors weights are not 64-byte aligned and matrix products on them round differently, so a copy
    makes results equal bit for bit between processes however the weights came in.
    """
    module.eval().requires_grad_(False).to(device)
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
