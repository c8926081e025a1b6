"""Loading of diffusers pipelines and networks, common to all model families."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from async_flowrl.transfers import settle

TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
"""Names of text encoders among a pipeline's components."""


def weight_options(dtype: torch.dtype, revision: str | None) -> dict[str, Any]:
    """Returns keyword arguments for every `from_pretrained`: dtype, revision, and safetensors only."""
    import diffusers

    name = "dtype" if Version(diffusers.__version__) >= Version("0.42") else "torch_dtype"
    return {name: dtype, "revision": revision, "use_safetensors": True}


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager: hides the progress bars of diffusers and transformers, because many processes load at once."""
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


def load_whole(stock: Any, path: str, device: torch.device, *, text_on_host: bool = False, **options: Any) -> Any:
    """Loads the pipeline of class `stock` to `device`, with all networks settled (see `settle`).

    `text_on_host=True` keeps the text encoders in host memory. A part is left out if `options` has None under its name.
    """
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
    """Settles all networks of a pipeline (see `settle`), except for the components named in `except_for`."""
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and name not in except_for:
            settle(component, device)
